"""Files of systemd's user units: where they are, and how their values are written."""

from __future__ import annotations

import os
from pathlib import Path


def unit_path(name: str) -> Path:
    """Return the path of a unit's file in the user's systemd configuration."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(config) / "systemd" / "user" / name


def plain(value: str) -> str:
    """Escape the percent signs in a value that extends to the end of its line."""
    return value.replace("%", "%%")


def word(value: str) -> str:
    """Return a value as one word of a command line."""
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{quoted}"'
