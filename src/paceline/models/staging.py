"""Folders in which a registration is made before it has a name, and what is left of those that were killed.

    <models>/.parts/<boot id>-<token>/lock      held by the process that works here
    <models>/.parts/<boot id>-<token>/files/    files that come
    <models>/.parts/gone-<token>/               a version that is being removed

A folder is gone once its process is: it removes it, or becomes a version, or whoever registers or prunes next removes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.models.record import FILES
from paceline.system import locks, processes
from paceline.system.files import remove_tree, tree_size

#: With what the name of a version begins that is being removed: whoever meets it goes on with that.
GONE = "gone-"
_LOCK = "lock"
#: From a folder's making to its lock it takes moments.
_FRESH_S = 60.0
#: Of another machine, whose locks may not be seen here: nothing was written for so long.
_ABANDONED_S = 3600.0


@contextlib.contextmanager
def staged(parts: Path) -> Iterator[Path]:
    """A new folder `files` within one of its own, which is removed in the end, whatever is left of it.

    The yielded folder's parent may be renamed away.
    """
    top = parts / f"{processes.boot_id()[:8] or 'unknown'}-{secrets.token_hex(8)}"
    try:
        (top / FILES).mkdir(parents=True)
        with locks.locked(top / _LOCK):
            yield top / FILES
    finally:
        remove_tree(top)


def ready(files: Path) -> Path:
    """The folder to be renamed, without its lock: from now on nobody may take it for abandoned but by its age."""
    (files.parent / _LOCK).unlink(missing_ok=True)
    return files.parent


def abandoned(parts: Path) -> Iterator[tuple[Path, int]]:
    """(path, bytes) of each folder whose process is gone."""
    try:
        names = sorted(os.listdir(parts))
    except OSError:
        return
    for name in names:
        path = parts / name
        with contextlib.suppress(OSError):
            if _is_abandoned(path):
                yield path, tree_size(path)


def sweep(parts: Path) -> int:
    """Remove what killed registrations and removals have left; its bytes. Never raises."""
    total = 0
    for path, size in abandoned(parts):
        with contextlib.suppress(OSError):
            remove_tree(path)
            total += size
    return total


def _is_abandoned(path: Path) -> bool:
    if path.name.startswith(GONE):
        return True
    if locks.is_held(path / _LOCK):
        return False
    quiet_s = time.time() - _last_change_s(path)
    is_here = path.name.startswith(f"{processes.boot_id()[:8] or 'unknown'}-")
    return quiet_s > (_FRESH_S if is_here else _ABANDONED_S)


def _last_change_s(path: Path) -> float:
    latest = os.lstat(path).st_mtime
    for folder, _, names in os.walk(path):
        for name in ("", *names):
            with contextlib.suppress(OSError):
                # Of the inode: a kept file's own time of change is fixed.
                latest = max(latest, os.lstat(os.path.join(folder, name)).st_ctime)
    return latest
