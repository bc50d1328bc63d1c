"""Questions to a disk on the machine that has it: how full it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

#: More than a worker's report of its exception takes.
REPORT_BYTES = 1 << 14


def disk_of(path: str) -> tuple[int, int, int]:
    """(bytes that the user may still write, bytes in all, number of the file system) of the disk of `path`.

    Raises:
        OSError: there is no such folder.
    """
    found = os.statvfs(path)
    # f_bavail leaves out what is kept for root.
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, os.stat(path).st_dev


def disks_here(paths: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Path -> (bytes free for the user, bytes in all, number of the file system); paths that are not there are left out."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = disk_of(path)
    return found


def is_low(free: int, total: int) -> bool:
    """True if a disk is about to be full: less than a twentieth of it is free, or 2 GB; of a large one 20 GB, of a small
    one a tenth.
    """
    gb = 10**9
    return free < min(max(total / 20, 2 * gb), 20 * gb, total / 10)
