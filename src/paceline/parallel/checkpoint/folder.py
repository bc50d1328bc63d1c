"""The folder of checkpoints, each of which is complete or absent. Standard library alone.

    <parent>/<name>                       a complete checkpoint: a folder gets this name only by a rename
    <parent>/.<name>.former               the one that it replaces, until the new one has the name
    <parent>/.<name>.saving-<8 hex>       one that is being written; `lock` in it is held as long as somebody writes

A process that is killed leaves a folder of the third kind, which the next save removes, or one of the second, which is
found in place of the missing one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.files import DIR_VARIABLE, LOCKED_WITHIN_S, sync_file, sync_folder
from paceline.parallel.errors import CheckpointError, ParallelError
from paceline.parallel.full_tensor import cut_as, is_part
from paceline.parallel.mesh import World
from paceline.parallel.reduce import local

_SAVING = re.compile(r"\..+\.saving-[0-9a-f]{8}\Z", re.DOTALL)
_STEP = re.compile(r"(?:step_(\d+)|\.step_(\d+)\.former)\Z")
_LOCK = "lock"

#: The file beside torch's own.
RECORD = "paceline.pt"

_log = logging.getLogger(__name__)
_groups: WeakKeyDictionary[World, Any] = WeakKeyDictionary()


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


class Background:
    """A save that is under way on this rank, or done.

    error: why it failed on this rank; known when it is no longer running.
    """

    def __init__(
        self,
        world: World,
        tensors: Mapping[str, Tensor],
        folder: Path,
        saving: Saving | None,
        record: bytes,
        *,
        threaded: bool,
    ) -> None:
        """Start it. saving, record: of rank 0, which writes the one and gives the folder its name in the end."""
        self.error: Exception | None = None
        self._folder = folder
        self._saving = saving
        self._record = record
        self._no_dist = world.size == 1
        self._group: Any = None
        self._thread: threading.Thread | None = None
        if threaded and world.size > 1:
            self._group = _own_group(world)
            threaded = self._group is not None
        if threaded:
            # The next step changes the parameters while the thread writes, so it writes a copy.
            self._tensors = {key: _copy(tensor) for key, tensor in tensors.items()}
            # The thread is no daemon: a program that ends right after save() waits until the checkpoint is written.
            self._thread = threading.Thread(target=self._run, name="paceline-checkpoint")
            self._thread.start()
        else:
            self._tensors = dict(tensors)
            self._run()

    @property
    def is_running(self) -> bool:
        """True while the save has to be waited for."""
        return self._thread is not None

    def join(self) -> None:
        """Return once it has ended, well or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            self._write()
            if self._saving is not None:
                # All ranks have written their parts now: on rank 0 torch's save returns after each rank has told it so.
                self._saving.commit()
        except Exception as error:
            text = str(error) if isinstance(error, CheckpointError) else reason(error)
            self.error = CheckpointError(f"the checkpoint could not be written to {str(self._folder.parent)!r}: {text}")
            if self._thread is not None:
                _log.error("%s", self.error)
            if self._saving is not None:
                self._saving.abandon()
        finally:
            self._tensors = {}

    def _write(self) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with warnings.catch_warnings():
            # torch warns that it assumes a single process, for there is no process group. There is a single process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            writer = FileSystemWriter(self._folder)
            try:
                save(self._tensors, storage_writer=writer, process_group=self._group, no_dist=self._no_dist)
            except CheckpointException as error:  # a BaseException
                raise CheckpointError(reason(error)) from error
        if self._saving is not None:
            # The record is written after torch's save: if it failed before that, the other ranks would wait for rank 0 in
            # the save.
            path = self._folder / RECORD
            path.write_bytes(self._record)
            sync_file(path)


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, cut in the same way."""
    copied = local(tensor.detach()).to("cpu", copy=True)
    return cut_as(tensor, copied) if is_part(tensor) else copied


def _own_group(world: World) -> Any:
    """A group for messages between the ranks' threads, which must not meet those of the training; None with MPI."""
    if world not in _groups:
        # A group over Gloo is made by way of a store, and a world over MPI has none.
        is_mpi = str(dist.get_backend()) == "mpi"
        # One group for all saves: to make one is a collective of the whole world, and each costs connections.
        _groups[world] = None if is_mpi else dist.new_group(backend="gloo")
        if is_mpi:
            _log.warning("asynchronous=True: with the backend mpi the training waits while a checkpoint is written")
    return _groups[world]


def reason(error: BaseException) -> str:
    """Whose error it was and what it says, without tracebacks."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return f"{type(error).__name__}: {error}"
    rank, wrapped = min(failures.items())
    cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    return f"rank {rank}: {type(cause).__name__}: {cause}"
