"""Where the live page of a workspace can be looked at, while it is served: `<workspace>/ui/address`.

The server holds the file's lock for as long as it lives, so nobody takes the address of one that was killed for a page.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from paceline.system import locks


def announce(workspace_dir: Path, url: str) -> int | None:
    """Say that the page is at `url`, which has no token; an open file that has to stay open. None where another server is
    known already, or nothing can be written there.
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
    """The address, without a slash at its end; None where no server of this machine serves the workspace."""
    path = _path(workspace_dir)
    try:
        if not locks.is_held(path):
            return None
        told = json.loads(path.read_text())
        return str(told["url"]) if told["host"] == socket.gethostname() else None
    # While a server is beginning, half of it may be there.
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(workspace_dir: Path) -> Path:
    return workspace_dir / "ui" / "address"
