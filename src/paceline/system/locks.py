"""Locks on files, which the kernel frees when the last process that holds one ends, however it ends.

A file lock needs no clock, no pid that another process may have got since, and no heartbeat. So a run's says who looks
after it: the submitting program makes the lock together with the run's folder and hands the open file on to the
supervisor, and there is no moment at which a run that somebody looks after seems deserted.

Who can open a file can hold its lock, and keep others waiting for ever. So a lock's file is its owner's alone, and the
group's where the group may write to the folder that it lies in: those can do worse there. Whoever can't open it learns from
the kernel's list whether it is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.system import lock_holder

# flock(2), here and below, and not the record locks of fcntl(2). A process loses those when it closes any file of the same
# name, wherever in it, and can't hand one on; a flock belongs to the open file, and is held until the last descriptor of it is
# closed, in a forked child or in a process that got it through a socket, too.

_POLL_S = 0.02


class LockHeldError(OSError):
    """Somebody holds a lock for longer than it should be; the message names the lock and who that is."""


def take(path: Path) -> int | None:
    """An open file that holds the lock, or None where another process holds it, or where it is another user's alone. Not
    inherited by programs started later.

    Raises:
        OSError: the file can't be opened.
    """
    try:
        fd = _open(path)
    except PermissionError:
        if not path.exists():
            raise
        return None
    # flock(2), not fcntl's locks: those belong to the process, and any close of the file in it would give them up.
    try:
        # Never to wait: many ask in passing, with nothing lost if somebody has it.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def take_within(path: Path, patience_s: float) -> int | None:
    """As `take`, but waits for so long for whoever holds the lock."""
    deadline = time.monotonic() + patience_s
    while (fd := take(path)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return fd


def is_held(path: Path, *, here: bool = True) -> bool:
    """True if a living process holds the lock. Readers do not disturb each other: they ask for a shared lock.

    here: whether its holder would be a process of this machine. Of another user's lock, which can't be opened, the kernel
    tells for its own processes alone: any other counts as held.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        rows = lock_holder.rows()
        return not here or rows is None or bool(lock_holder.pids(path, rows))
    except OSError:
        return False
    try:
        # Shared, so that of two readers who look at once neither takes the other for a holder. Only `take` may fail for it, in
        # the moment until it is closed; who has to have a lock asks again.
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
    """A block in which no other process holds the lock; its value is the open file that holds it.

    on_wait: called once where another process holds it, before waiting for that one. patience_s: how long to wait for a lock
    that is only ever held for moments; None: for ever.

    Raises:
        LockHeldError: another process has held it for `patience_s`.
        OSError: the file can't be opened, or lies on a file system without locks.
    """
    fd = _open(path)
    try:
        try:
            # At first without waiting, to know whether there is anything to wait for.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            if patience_s is None:
                fcntl.flock(fd, fcntl.LOCK_EX)
            else:
                # Polled: flock has no limit of time, and the alarm signal that could cut it short belongs to the program.
                _wait(fd, path, patience_s)
        yield fd
    finally:
        # Gives the lock back: programs that were started meanwhile have not inherited the file (O_CLOEXEC).
        os.close(fd)


@contextlib.contextmanager
def shared(path: Path) -> Iterator[int]:
    """A block in which no process can hold the lock alone, though others may share it; its value is the open file.

    Raises:
        OSError: as `locked`.
    """
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield fd
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    try:
        # Not inherited over exec: a program started later would hold the lock for as long as it runs. RDWR: NFS gives an
        # exclusive lock only on a file that is open for writing.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Two processes may come here at once: without O_EXCL the second one opens the file that the first has made.
        is_shared = os.stat(path.parent).st_mode & stat.S_IWGRP
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660 if is_shared else 0o600)


def _wait(fd: int, path: Path, patience_s: float) -> None:
    end_s = time.monotonic() + patience_s
    while True:
        try:
            # Asked again and again: flock has no time limit, and an alarm would be the whole process's.
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise LockHeldError(
                    f"{lock_holder.holder(path)} has held the lock {str(path)!r} for {patience_s:g} s, which is needed for "
                    "moments. Let that process go on (a stopped one: kill -CONT), or end it."
                ) from None
        time.sleep(_POLL_S)
