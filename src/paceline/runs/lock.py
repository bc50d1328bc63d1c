"""Who looks after a run: the holder of a lock that the kernel frees when its last process ends, however it ends.

The submitting program makes the lock together with the run's folder and hands the open file on to the supervisor, so
there is no moment at which a run that somebody looks after seems deserted. A file lock needs no clock, no pid that
another process may have got since, and no heartbeat.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def take(path: Path) -> int | None:
    """An open file that holds the lock, or None where another process holds it. Not inherited by programs started later."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
