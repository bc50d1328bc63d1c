"""One save of a checkpoint, at once or behind the training's back. Loaded on use: it imports torch."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.files import sync_file
from paceline.parallel.checkpoint.folder import Saving
from paceline.parallel.errors import CheckpointError
from paceline.parallel.full_tensor import cut_as, is_part
from paceline.parallel.mesh import World
from paceline.parallel.reduce import local

#: The file beside torch's own.
RECORD = "paceline.pt"

_log = logging.getLogger(__name__)
_groups: WeakKeyDictionary[World, Any] = WeakKeyDictionary()


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
