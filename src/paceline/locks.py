"""Locks on files, which the kernel frees when the last process that holds one ends, however it ends.

A file lock needs no clock, no pid that another process may have got since, and no heartbeat. So a run's says who looks
after it: the submitting program makes the lock together with the run's folder and hands the open file on to the
supervisor, and there is no moment at which a run that somebody looks after seems deserted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def take(path: Path) -> int | None:
    """An open file that holds the lock, or None where another process holds it. Not inherited by programs started later.

    Raises:
        OSError: the file can't be opened.
    """
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock. Readers do not disturb each other: they ask for a shared lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(path: Path, *, on_wait: Callable[[], object] | None = None, mode: int = 0o666) -> Iterator[int]:
    """While it lasts, no other process holds the lock; the open file that holds it.

    on_wait: called once where another process holds it, before waiting for that one. mode: of the file, less the umask;
    who may read it may hold the lock.

    Raises:
        OSError: the file can't be opened, or lies on a file system without locks.
    """
    fd = _open(path, mode)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def shared(path: Path) -> Iterator[int]:
    """While it lasts, no process can hold the lock alone, though others may share it; the open file that holds it.

    Raises:
        OSError: as `locked`.
    """
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield fd
    finally:
        os.close(fd)


def _open(path: Path, mode: int = 0o666) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
