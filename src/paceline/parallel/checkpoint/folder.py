"""The folder of checkpoints, each of which is complete or absent. Standard library alone.

    <parent>/<name>                       a complete checkpoint: a folder gets this name only by a rename
    <parent>/.<name>.former               the one that it replaces, until the new one has the name
    <parent>/.<name>.saving-<8 hex>       one that is being written; `lock` in it is held as long as somebody writes

A process that is killed leaves a folder of the third kind, which the next save removes, or one of the second, which is
found in place of the missing one.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from paceline.checkpoint.files import DIR_VARIABLE, LOCKED_WITHIN_S, sync_folder
from paceline.parallel.errors import ParallelError

_SAVING = re.compile(r"\..+\.saving-[0-9a-f]{8}\Z", re.DOTALL)
_STEP = re.compile(r"(?:step_(\d+)|\.step_(\d+)\.former)\Z")
_LOCK = "lock"


def steps_dir() -> Path:
    """The folder of the run's checkpoints.

    Raises:
        ParallelError: the variable is not set.
    """
    named = os.environ.get(DIR_VARIABLE)
    if not named:
        raise ParallelError(
            f"save() and load() without a path use the folder that {DIR_VARIABLE} names, and it is not set: a run of Paceline "
            "sets it. Give a path, or set it."
        )
    return Path(named)


def step_path(folder: Path, step: int) -> Path:
    """The checkpoint after so many steps."""
    return folder / f"step_{step}"


def newest(folder: Path) -> Path | None:
    """The path of the checkpoint with the most steps, or None if there is none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    steps = {int(match[1] or match[2]) for name in names if (match := _STEP.match(name))}
    # The name alone is not enough: a checkpoint counts only where its metadata is there.
    for step in sorted(steps, reverse=True):
        if find(step_path(folder, step)) is not None:
            return step_path(folder, step)
    return None


def find(path: Path) -> Path | None:
    """The folder in which the complete checkpoint of this path lies, or None."""
    for candidate in (path, _former(path)):
        if (candidate / ".metadata").is_file():
            return candidate
    return None


class Saving:
    """A checkpoint that is being written. path: where it will lie; folder: where it lies until then."""

    def __init__(self, path: Path) -> None:
        """Make the folder, and remove those of saves that were killed.

        Raises:
            ParallelError: something that is no checkpoint has the name.
            OSError: the folder can't be made.
        """
        self.path = path
        # An empty folder is taken, for the script may have made it for this.
        if os.path.lexists(path) and find(path) != path and not _is_empty(path):
            raise ParallelError(f"{str(path)!r} is there and is no checkpoint. Give a path that is free.")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        self.folder = path.with_name(f".{path.name}.saving-{secrets.token_hex(4)}")
        self.folder.mkdir()
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def commit(self) -> None:
        """Give the folder its name; it has to be whole. What had the name before goes."""
        # Before the rename: after a power cut a folder that has its name must have its files.
        sync_folder(self.folder)
        former = _former(self.path)
        # A rename replaces no folder that has something in it, so the former one is moved away and not removed: until the new
        # one has its name it is what `find` gives.
        if find(self.path) == self.path:
            shutil.rmtree(former, ignore_errors=True)
            os.rename(self.path, former)
        elif os.path.lexists(self.path):
            self.path.rmdir()
        os.rename(self.folder, self.path)
        # A rename is on the disk once the folder that holds the name is.
        sync_folder(self.path.parent)
        # The lock goes only now that the folder has its name: without a lock another save would take it for what a killed
        # process has left.
        (self.path / _LOCK).unlink()
        shutil.rmtree(former, ignore_errors=True)
        self._close()

    def abandon(self) -> None:
        """Remove what has been written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_leftovers(parent: Path) -> None:
    """Remove what killed saves have left in this folder; those that somebody still writes stay."""
    for name in os.listdir(parent):
        if not _SAVING.match(name):
            continue
        try:
            fd = os.open(parent / name / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            # The process that made it was killed before it had the lock, or is just about to take it.
            if _age_s(parent / name) > LOCKED_WITHIN_S:
                shutil.rmtree(parent / name, ignore_errors=True)
            continue
        except OSError:
            continue
        try:
            # Whoever writes holds this lock, and the kernel lets go of it when the process ends, however it ends.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(parent / name, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(fd)


def _age_s(folder: Path) -> float:
    try:
        return time.time() - os.lstat(folder).st_mtime
    except OSError:
        return 0.0


def _former(path: Path) -> Path:
    return path.with_name(f".{path.name}.former")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not os.listdir(path)
