"""The folder of a checkpoint, which is complete or absent, and the thread that writes it.

    <parent>/<name>                       a complete checkpoint: a folder gets this name only by a rename
    <parent>/.<name>.former               the previous checkpoint, until the new one has the name
    <parent>/.<name>.saving-<8 hex>       a folder under construction, whose `lock` the writer holds

A killed process leaves a folder of the third kind, which the next save removes, or one of the second, which is read in place of
the missing one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.files import DIR_VARIABLE, LOCKED_WITHIN_S
from paceline.parallel.errors import CheckpointError, ParallelError
from paceline.parallel.full_tensor import cut_as, is_part
from paceline.parallel.mesh import World
from paceline.parallel.reduce import local
from paceline.system.files import age_s, sync_file, sync_if_possible

_SAVING = re.compile(r"\..+\.saving-[0-9a-f]{8}\Z", re.DOTALL)
_STEP = re.compile(r"(?:step_(\d+)|\.step_(\d+)\.former)\Z")
_LOCK = "lock"

#: The file of a checkpoint that is not torch's own.
RECORD = "paceline.pt"

_log = logging.getLogger(__name__)
_groups: WeakKeyDictionary[World, Any] = WeakKeyDictionary()


def steps_dir() -> Path:
    """Return the folder of the run's checkpoints, from PACELINE_CHECKPOINT_DIR.

    Raises:
        ParallelError: The variable is not set.
    """
    named = os.environ.get(DIR_VARIABLE)
    if not named:
        raise ParallelError(
            f"save() and load() without a path use the folder that {DIR_VARIABLE} names, and it is not set: a run of Paceline "
            "sets it. Give a path, or set it."
        )
    return Path(named)


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / f"step_{step}"


def newest(folder: Path) -> Path | None:
    """Return the path of the checkpoint with the most steps, or None."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    steps = {int(match[1] or match[2]) for name in names if (match := _STEP.match(name))}
    # A name is not enough: a checkpoint counts only with its metadata.
    for step in sorted(steps, reverse=True):
        if find(step_path(folder, step)) is not None:
            return step_path(folder, step)
    return None


def find(path: Path) -> Path | None:
    """Return the folder that has the complete checkpoint of this path, or None."""
    for candidate in (path, _former(path)):
        if (candidate / ".metadata").is_file():
            return candidate
    return None


class Saving:
    """A checkpoint under construction in `folder`, which will become `path`."""

    def __init__(self, path: Path) -> None:
        """Make the folder, and remove the folders of killed saves.

        Raises:
            ParallelError: Something other than a checkpoint has the name.
            OSError: The folder cannot be made.
        """
        self.path = path
        # Accept an empty folder: the script may have made it for this checkpoint.
        if os.path.lexists(path) and find(path) != path and not _is_empty(path):
            raise ParallelError(f"{str(path)!r} is there and is not a checkpoint. Give a path that is free.")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        self.folder = path.with_name(f".{path.name}.saving-{secrets.token_hex(4)}")
        self.folder.mkdir()
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def commit(self) -> None:
        """Rename the complete folder to its path, and remove a former checkpoint."""
        # Sync before the rename: after a power failure a folder with the final name must have its files.
        sync_if_possible(self.folder)
        former = _former(self.path)
        # A rename cannot replace a non-empty folder, so the former one is moved. `find` returns it until the new one has its
        # name.
        if find(self.path) == self.path:
            shutil.rmtree(former, ignore_errors=True)
            os.rename(self.path, former)
        elif os.path.lexists(self.path):
            self.path.rmdir()
        os.rename(self.folder, self.path)
        # A rename is durable once the parent folder is on the disk.
        sync_if_possible(self.path.parent)
        # Remove the lock only after the rename: without it another save would take the folder for a killed process's.
        (self.path / _LOCK).unlink()
        shutil.rmtree(former, ignore_errors=True)
        self._close()

    def abandon(self) -> None:
        """Remove the unfinished folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_leftovers(parent: Path) -> None:
    """Remove the folders of killed saves."""
    for name in os.listdir(parent):
        if not _SAVING.match(name):
            continue
        try:
            fd = os.open(parent / name / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            # The save was killed before it took the lock, or is about to take the lock.
            if age_s(parent / name) > LOCKED_WITHIN_S:
                shutil.rmtree(parent / name, ignore_errors=True)
            continue
        except OSError:
            continue
        try:
            # The writer holds this lock. The kernel releases it when the process ends.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(parent / name, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(fd)


def _former(path: Path) -> Path:
    return path.with_name(f".{path.name}.former")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not os.listdir(path)


class Background:
    """A save in progress on this rank, or a finished one.

    `error` is this rank's failure, known when the save has ended.
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
        """Start the save. Only rank 0 passes `saving` and `record`."""
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
            # Write a copy, because the next step changes the parameters while the thread writes.
            self._tensors = {key: _copy(tensor) for key, tensor in tensors.items()}
            # Not a daemon thread: a program that ends right after save() waits until the checkpoint is complete.
            self._thread = threading.Thread(target=self._run, name="paceline-checkpoint")
            self._thread.start()
        else:
            self._tensors = dict(tensors)
            self._run()

    @property
    def is_running(self) -> bool:
        """True while the save is in progress."""
        return self._thread is not None

    def join(self) -> None:
        """Wait until the save has ended, with success or with an error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            self._write()
            if self._saving is not None:
                # All ranks have written their parts: on rank 0 torch's save returns after every rank's report.
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
            # torch warns that it assumes a single process without a process group, which is right.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            writer = FileSystemWriter(self._folder)
            try:
                save(self._tensors, storage_writer=writer, process_group=self._group, no_dist=self._no_dist)
            except CheckpointException as error:  # torch's CheckpointException is a BaseException
                raise CheckpointError(reason(error)) from error
        if self._saving is not None:
            # Write the record after torch's save. If it failed before, the other ranks would wait for rank 0 in the save.
            path = self._folder / RECORD
            path.write_bytes(self._record)
            sync_file(path)


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU; a DTensor stays split in the same way."""
    copied = local(tensor.detach()).to("cpu", copy=True)
    return cut_as(tensor, copied) if is_part(tensor) else copied


def _own_group(world: World) -> object:
    """Return a process group for the saving threads, or None with MPI.

    The threads' messages must not mix with those of training.
    """
    if world not in _groups:
        # A Gloo group needs a store, which a world over MPI lacks.
        is_mpi = str(dist.get_backend()) == "mpi"
        # One group for all saves: making one is a collective of the whole world and costs connections.
        _groups[world] = None if is_mpi else dist.new_group(backend="gloo")
        if is_mpi:
            _log.warning("asynchronous=True: with the backend mpi the training waits while a checkpoint is written")
    return _groups[world]


def reason(error: BaseException) -> str:
    """Return which rank failed and its error message, without tracebacks."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return f"{type(error).__name__}: {error}"
    rank, wrapped = min(failures.items())
    cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    return f"rank {rank}: {type(cause).__name__}: {cause}"
