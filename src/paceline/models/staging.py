"""Staging folders of registrations, and their cleanup after a kill.

    <models>/.parts/<boot id>-<token>/lock      held by the registering process
    <models>/.parts/<boot id>-<token>/files/    files copied so far
    <models>/.parts/gone-<token>/               a version being removed

The registering process removes its folder or renames it to a version. The next registration or pruning removes the folders of
killed processes.
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
from paceline.system.files import gone_is_fine, names_in, remove_tree, tree_size

#: Prefix of the folder of a version that is being removed; any process may finish the removal.
GONE = "gone-"
_LOCK = "lock"
#: A process locks its new folder within this many seconds. Until then, a folder without a lock does not count as abandoned.
_FRESH_S = 60.0
#: Seconds without a write after which a folder of another machine counts as abandoned, because its lock may be invisible.
_ABANDONED_S = 3600.0


@contextlib.contextmanager
def staged(parts: Path) -> Iterator[Path]:
    """Yield the folder `files` in a new staging folder, which is removed afterwards.

    Within the block, the caller may rename the staging folder to the folder of a version.
    """
    top = parts / f"{processes.boot_id()[:8] or 'unknown'}-{secrets.token_hex(8)}"
    try:
        (top / FILES).mkdir(parents=True)
        with locks.locked(top / _LOCK):
            yield top / FILES
    finally:
        remove_tree(top)


def ready(files: Path) -> Path:
    """Unlock a staging folder, and return its path for renaming it."""
    (files.parent / _LOCK).unlink(missing_ok=True)
    return files.parent


def abandoned(parts: Path) -> Iterator[tuple[Path, int]]:
    """Yield (path, bytes) of each staging folder whose process has died."""
    for name in names_in(parts):
        path = parts / name
        with gone_is_fine():
            if _is_abandoned(path):
                yield path, tree_size(path)


def sweep(parts: Path) -> int:
    """Remove abandoned staging folders, ignoring errors. Return the freed bytes."""
    total = 0
    for path, size in abandoned(parts):
        with gone_is_fine():
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
            with gone_is_fine():
                # Use the ctime, because all registered files get the same modification time.
                latest = max(latest, os.lstat(os.path.join(folder, name)).st_ctime)
    return latest
