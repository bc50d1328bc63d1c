"""Write a systemd user unit that starts a service's supervisor, also after a reboot.

https://www.freedesktop.org/software/systemd/man/latest/systemd.service.html
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.errors import ServiceError
from paceline.services.folder import ServiceFolder
from paceline.system.detached_process import library_dir
from paceline.system.names import is_one_line
from paceline.system.systemd import plain, unit_path, word

#: Seconds after a stop request until systemd kills the service: more than `drain_s`, so that open requests are answered.
_STOP_S = 120


def name(folder: ServiceFolder) -> str:
    return f"paceline-{folder.name}.service"


def path(folder: ServiceFolder) -> Path:
    """Return the unit file's path in the user's systemd configuration."""
    return unit_path(name(folder))


def text(folder: ServiceFolder) -> str:
    """Return the text of the systemd unit that starts the service.

    Raises:
        ServiceError: A path has a line break or a control character, which would add lines to the unit.
    """
    for place in (sys.executable, str(folder.path), str(library_dir(folder.workspace_dir))):
        if not is_one_line(place):
            raise ServiceError(f"{place!r} has a line break or a control character, which no unit can have. Rename it.")
    words = [sys.executable, "-m", "paceline.services", str(folder.path)]
    return f"""[Unit]
Description=Paceline service {folder.name}
After=network-online.target
# False once the service is deleted.
ConditionPathExists={plain(str(folder.record))}

[Service]
ExecStart={" ".join(map(word, words))}
Environment={word(f"PYTHONPATH={library_dir(folder.workspace_dir)}")}
Environment={word(f"PACELINE_SUPERVISOR={folder.name}")}
WorkingDirectory={plain(str(folder.path))}
StandardOutput=append:{plain(str(folder.log))}
StandardError=append:{plain(str(folder.log))}
# `paceline service stop` ends it for good, with exit code 0.
Restart=on-failure
RestartSec=1
# SIGTERM goes to the supervisor alone, which first lets requests end.
KillMode=mixed
TimeoutStopSec={_STOP_S}

[Install]
WantedBy=default.target
"""


def instructions(folder: ServiceFolder) -> list[str]:
    """Return instructions for installing the unit, as lines."""
    return [
        f"Put it into {path(folder)}, then:",
        "  systemctl --user daemon-reload",
        f"  systemctl --user enable --now {name(folder)}",
        "  loginctl enable-linger      # so that it is started without a login",
    ]
