"""Paths and escaped values of systemd's user unit files."""

from __future__ import annotations

import os
from pathlib import Path


def unit_path(name: str) -> Path:
    """Return the path of a unit's file in the user's systemd configuration."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(config) / "systemd" / "user" / name


def plain(value: str) -> str:
    """Return a value with doubled percent signs, for unquoted use in a unit file."""
    return value.replace("%", "%%")


def word(value: str) -> str:
    """Return a value quoted as one word of a unit's command line."""
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{quoted}"'
