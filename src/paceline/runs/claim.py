"""Claims of supervisors and controllers to their runs.

Usually the lock of the run excludes a second process. But a network file system releases the locks of a machine that was
suspended or cut off, and some file systems have no locks. So each process that takes the lock writes a claim into its
file, as a fencing token: pid, host and a random number. A former process that continues finds the other claim before it
acts, and ends.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.runs.driver_log import say
from paceline.system import lock_holder, locks, processes

#: Maximum number of seconds to wait for the run's lock. NFS 4 releases the locks of a lost machine after 90 s.
_LOCK_S = 120.0
#: Exit code of a process that finds its run taken by another process: EX_TEMPFAIL of sysexits.h.
_EXIT_TAKEN = 75


@dataclass(frozen=True)
class Claim:
    """A process's claim to a lock, in the lock's file: pid, host, random number."""

    lock: Path
    text: bytes  # this process has written it, or the process that has forked this one

    @classmethod
    def take(cls, lock: Path, fd: int | None) -> Claim:
        """Take a lock, and write this process's pid and host into its file.

        End this process if another one keeps the lock. fd: A descriptor that already holds the lock, or None.
        """
        if fd is None:
            fd = locks.opened(lock)
            try:
                locks.wait(fd, lock, _LOCK_S)
            except locks.LockHeldError:
                say(
                    f"{lock_holder.holder(lock)} has held the lock {str(lock)!r} for {_LOCK_S:g} s, and the last supervisor or "
                    f"controller is {os.fsdecode(locks.claimed(lock) or b'unknown')}. So this process ends and leaves the run to "
                    "that one. Let it go on (a stopped one: kill -CONT), or end it."
                )
                processes.leave(_EXIT_TAKEN)
            except OSError as error:
                say(
                    f"warning: {str(lock)!r} can't be locked: {error.strerror}. Only the engine prevents a second process."
                )
        # Don't let workers inherit the file: a worker would hold the lock even after the supervisor's death.
        os.set_inheritable(fd, False)
        return cls(lock, locks.claim(fd))

    def is_lost(self) -> bool:
        """Return whether another process has taken over the lock."""
        return locks.claimed(self.lock) not in (None, self.text)

    def check(self) -> None:
        """End this process and its children if another process has the lock.

        They end at once, because an orderly end would release leases and remove files that the other process uses.
        """
        if self.is_lost():
            say(
                f"pid {os.getpid()} ends: {os.fsdecode(locks.claimed(self.lock) or b'another one')} has taken over its work"
            )
            processes.kill_descendants(os.getpid())
            processes.leave(_EXIT_TAKEN)
