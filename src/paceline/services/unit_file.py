"""A systemd user unit that looks after a service: back after a reboot, and at once where somebody has killed it.

https://www.freedesktop.org/software/systemd/man/latest/systemd.service.html
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.errors import ServiceError
from paceline.services.folder import ServiceFolder
from paceline.system.detached_process import library_dir
from paceline.system.names import is_one_line

#: Longer than the time that requests have to end in.
_STOP_S = 120


def name(folder: ServiceFolder) -> str:
    return f"paceline-{folder.name}.service"


def path(folder: ServiceFolder) -> Path:
    """Where the user's units lie."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(config) / "systemd" / "user" / name(folder)


def text(folder: ServiceFolder) -> str:
    """The unit.

    Raises:
        ServiceError: A path has a line break or a control character, which would be a line of the unit.
    """
    for place in (sys.executable, str(folder.path), str(library_dir(folder.workspace_dir))):
        if not is_one_line(place):
            raise ServiceError(
                f"{place!r} has a line break or a control character, which no unit can carry. Rename it."
            )
    words = [sys.executable, "-m", "paceline.services", str(folder.path)]
    return f"""[Unit]
Description=Paceline service {folder.name}
After=network-online.target
# Once it was deleted.
ConditionPathExists={_plain(str(folder.record))}

[Service]
ExecStart={" ".join(map(_word, words))}
Environment={_word(f"PYTHONPATH={library_dir(folder.workspace_dir)}")}
Environment={_word(f"PACELINE_SUPERVISOR={folder.name}")}
WorkingDirectory={_plain(str(folder.path))}
StandardOutput=append:{_plain(str(folder.log))}
StandardError=append:{_plain(str(folder.log))}
# `paceline service stop` ends it for good, with exit code 0.
Restart=on-failure
RestartSec=1
# The supervisor alone is told to end: it lets requests end first.
KillMode=mixed
TimeoutStopSec={_STOP_S}

[Install]
WantedBy=default.target
"""


def instructions(folder: ServiceFolder) -> list[str]:
    """What to do with it."""
    return [
        f"Put it into {path(folder)}, then:",
        "  systemctl --user daemon-reload",
        f"  systemctl --user enable --now {name(folder)}",
        "  loginctl enable-linger      # so that it is started without a login",
    ]


def _plain(value: str) -> str:
    """A value that systemd reads to the line's end: `%` begins a specifier there."""
    return value.replace("%", "%%")


def _word(value: str) -> str:
    """One word of a command line or of an assignment, in quotes: `$` is the unit's own variable in a command line."""
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{quoted}"'
