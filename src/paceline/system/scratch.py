"""Temporary folders. If their process is killed, the user's next process that makes one removes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from paceline.system.files import is_at, remove_tree

_PREFIX = "paceline-temp-"


class Scratch(contextlib.AbstractContextManager[Path]):
    """A private temporary folder. A `with` block yields its path and finally removes it.

    A process locks its folder, and the kernel releases the lock when the process is killed. The next folder that this user
    creates beside it then removes it. The path is short enough for sockets, whose paths have at most 107 bytes.

    Attributes:
        path: The folder's path.
    """

    def __init__(self, purpose: str, top: str | None = None, *, for_exec: bool = False) -> None:
        """Create the folder in `top`, by default the system's folder for temporary files.

        purpose: A word for the folder's name.
        for_exec: Whether a program that replaces this one by exec keeps the lock.
        """
        top = top or tempfile.gettempdir()
        remove_abandoned(top)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=top))
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                # On a file system without locks, only this process removes the folder, because no other can lock it.
                with contextlib.suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                # Another process may have removed the new folder before it was locked. Then create another one.
                if is_at(self.path, self._lock):
                    break
                os.close(self._lock)
        os.set_inheritable(self._lock, for_exec)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder. Leave files that can't be removed."""
        with contextlib.suppress(OSError):
            remove_tree(self.path)
        # Unlock the folder after its removal, so that no other process removes it at the same time.
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(top: str) -> None:
    """Remove this user's temporary folders in `top` that no process has locked."""
    with contextlib.suppress(OSError), os.scandir(top) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _remove_unlocked(Path(entry.path))


def _remove_unlocked(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid == os.geteuid() and is_at(path, fd):
            remove_tree(path)
    finally:
        os.close(fd)
