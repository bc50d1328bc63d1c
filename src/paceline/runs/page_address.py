"""The address of a workspace's live page while a server runs: `<workspace>/ui/address`.

The server holds the file's lock. If the lock is free, readers ignore the address, because no server runs.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from paceline.system import locks


def announce(workspace_dir: Path, url: str) -> int | None:
    """Publish the live page's address in a locked file. Return its fd.

    `url` has no access token. Closing the fd unlocks the file. Return None if another server runs or the write fails.
    """
    path = _path(workspace_dir)
    try:
        fd = locks.take(path)
        if fd is not None:
            os.truncate(fd, 0)
            os.pwrite(fd, json.dumps({"url": url, "host": socket.gethostname()}).encode(), 0)
        return fd
    except OSError:
        return None


def page_of(workspace_dir: Path) -> str | None:
    """Return the live page's address, or None if no server runs."""
    path = _path(workspace_dir)
    try:
        if not locks.is_held(path):
            return None
        told = json.loads(path.read_text())
        return str(told["url"]) if told["host"] == socket.gethostname() else None
    # Also return None while a server is writing the file, because the file is incomplete then.
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(workspace_dir: Path) -> Path:
    return workspace_dir / "ui" / "address"
