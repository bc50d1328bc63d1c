"""File locks, which the kernel releases when the last process that holds them ends.

A file lock needs no clock and no heartbeat. It also needs no pid, which the kernel may reuse. The lock of a run tells
whether a supervisor watches the run. The submitting program takes the lock when it creates the run's folder. It passes
the open file to the supervisor, so the run never looks abandoned.

A user who can open the lock's file can take the lock and block others. So only the owner can open the file, and the
group if it may write to the folder. Other users learn from /proc/locks whether a process holds the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.system import lock_holder

# flock(2), not the record locks of fcntl(2). A process loses record locks when it closes any file of the same name, and can't
# pass them on. A flock belongs to the open file and is held until its last descriptor is closed, also in a forked child or a
# process that got it through a socket.

_POLL_S = 0.02


class LockHeldError(OSError):
    """The error that another process holds a lock too long; the message names both."""


def take(path: Path) -> int | None:
    """Take a file lock without waiting.

    Return the fd, or None if another process holds the lock or the user may not open its file. Later programs do not inherit it.

    Raises:
        OSError: The file can't be created or opened, for another reason.
    """
    try:
        fd = opened(path)
    except PermissionError:
        if not path.exists():
            raise
        return None
    try:
        # Don't wait: many callers want to know only whether the lock is free.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def take_within(path: Path, patience_s: float) -> int | None:
    """Take a file lock like `take`, but retry for `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while (fd := take(path)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return fd


def claim(fd: int) -> bytes:
    """Write a text that identifies the lock's holder into the lock's file, and return it."""
    text = f"process {os.getpid()} on {socket.gethostname()} ({os.urandom(4).hex()})".encode()
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)  # even on a full disk, the empty file shows that the former claim is lost
        return text[: os.pwrite(fd, text, 0)]
    return os.pread(fd, len(text), 0)  # otherwise don't read the file: another process may have written its claim since


def claimed(path: Path) -> bytes | None:
    """Return the text of the lock's last holder; None if the file can't be read."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # fewer system calls than `Path.read_bytes`
        try:
            return os.read(fd, 4096)
        finally:
            os.close(fd)
    return None


def is_held(path: Path, *, here: bool = True) -> bool:
    """Return whether a living process holds the file lock.

    here: Whether only processes of this machine can hold the lock. It matters if the user can't open the lock's file:
        with `here`, search /proc/locks of this machine for a holder; without it, return True.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        rows = lock_holder.rows()
        return not here or rows is None or bool(lock_holder.pids(path, rows))
    except OSError:
        return False
    try:
        # Use a shared lock, so that two processes that test the lock at once don't mistake each other for its holder. `take` may
        # fail meanwhile; callers that need the lock retry.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(
    path: Path, *, on_wait: Callable[[], object] | None = None, patience_s: float | None = None
) -> Iterator[int]:
    """Hold a file lock during a `with` block, and yield the file's descriptor.

    on_wait: Called once if another process holds the lock, before the wait.
    patience_s: Longest wait for the lock in seconds; None waits without limit.

    Raises:
        LockHeldError: Another process has held the lock for `patience_s`.
        OSError: The file can't be opened, or its file system has no locks.
    """
    fd = opened(path)
    try:
        try:
            # Try without waiting first, so that `on_wait` is called only if necessary.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            if patience_s is None:
                fcntl.flock(fd, fcntl.LOCK_EX)
            else:
                # Poll: flock has no timeout, and SIGALRM belongs to the program.
                wait(fd, path, patience_s)
        yield fd
    finally:
        # Closing releases the lock: programs started meanwhile have not inherited the file (O_CLOEXEC).
        os.close(fd)


@contextlib.contextmanager
def shared(path: Path) -> Iterator[int]:
    """Hold a shared file lock during a `with` block. It excludes only exclusive locks.

    Raises:
        OSError: The file can't be opened, or its file system has no locks.
    """
    fd = opened(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield fd
    finally:
        os.close(fd)


def opened(path: Path) -> int:
    """Open the file of a lock, and create a missing file."""
    try:
        # With O_CLOEXEC, a program started later does not keep the lock. O_RDWR: NFS grants exclusive locks only on
        # files open for writing.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Don't use O_EXCL: if two processes get here at once, the second opens the file of the first.
        is_shared = os.stat(path.parent).st_mode & stat.S_IWGRP
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660 if is_shared else 0o600)


def wait(fd: int, path: Path, patience_s: float) -> None:
    """Lock an open file within `patience_s` seconds.

    Raises:
        LockHeldError: Another process has held the lock for `patience_s`.
        OSError: The file system has no locks.
    """
    end_s = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise LockHeldError(
                    f"{lock_holder.holder(path)} has held the lock {str(path)!r} for {patience_s:g} s, which is needed for "
                    "moments. Let that process go on (a stopped one: kill -CONT), or end it."
                ) from None
        time.sleep(_POLL_S)
