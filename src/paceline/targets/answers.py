"""What engines have answered, kept for all runs of a workspace together: one asks, the others wait and take its answer.

<workspace>/engines/<name>.json, <name>.lock
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

#: How old an answer may be.
FRESH_S = 5.0


def answers_dir(workspace_dir: Path) -> Path:
    """Where the answers of a workspace's engines lie."""
    return workspace_dir / "engines"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """While it lasts, no other process asks: whether that is so. It is not where the folder can't be written to, nor on a
    file system without locks."""
    fd, is_held = -1, False
    try:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(fd, fcntl.LOCK_EX)
            is_held = True
        yield is_held
    finally:
        if fd >= 0:
            os.close(fd)
