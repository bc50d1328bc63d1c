"""The disks of this machine that a run writes to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from paceline.remote.agent.disks import disk_of


def disks_here(paths: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Path -> (bytes free for the user, bytes in all, number of the file system); paths that are not there are left out."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = disk_of(path)
    return found
