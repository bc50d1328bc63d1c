"""Checkpoints that any layout can write and any other can read. Loaded on use: it imports torch.

    save    1  rank 0 makes a folder beside the path                 checkpoint.folder
            2  every rank writes its part, once each                 torch.distributed.checkpoint
            3  rank 0 gives the folder its name                      when all have written; until then there is nothing
    load    1  names, shapes and groups are compared                 nothing is changed yet
            2  every rank reads what it holds, into new memory       torch.distributed.checkpoint
            3  model, optimizer, progress and schedulers take it

The folder is one of torch's own (`torch.distributed.checkpoint.load` reads it) with one file more, `paceline.pt`.
All functions are called on all ranks; the errors they raise are the same on each.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.checkpoint import leaving
from paceline.parallel.checkpoint import folder as folders
from paceline.parallel.checkpoint.folder import RECORD, Background, Saving, reason
from paceline.parallel.checkpoint.state import (
    HeldState,
    groups_mismatch,
    merge_records,
    mismatch,
    own_record,
    put_back,
    targets,
    tensors,
)
from paceline.parallel.checkpoint.state import full_state_dict as _full_state_dict
from paceline.parallel.errors import CheckpointError, ParallelError
from paceline.parallel.exchange import NotPlainError, from_first, gather
from paceline.parallel.mesh import World
from paceline.system.run_variables import REQUEST_VARIABLE

if TYPE_CHECKING:
    from paceline.parallel.executor import ParallelHandle

#: Of the record, the one file that is not torch's.
FORMAT = 1

_T = TypeVar("_T")
_background: WeakKeyDictionary[ParallelHandle, Background] = WeakKeyDictionary()


def save(
    par: ParallelHandle,
    path: str | Path | None = None,
    *,
    asynchronous: bool = False,
    schedulers: Sequence[Any] = (),
    every: int | None = None,
) -> Path | None:
    """The path of the checkpoint, which is complete when this returns; with `asynchronous`, when `wait` does.

    Where an elastic run is to go on with more nodes, the process ends once the checkpoint is complete; and where this process was
    sent SIGTERM since `every` was first given.

    path: a folder that is made, or replaced once the new one is complete; it has to be on a file system that all ranks
        share. None: `step_<n>` in the folder that PACELINE_CHECKPOINT_DIR names, n being the steps done.
    asynchronous: copy what is to be written and go on training; one save at a time, the next one waits for it and
        raises its error.
    schedulers: learning-rate schedulers, or anything else with `state_dict` and `load_state_dict`.
    every: called after each step, write only where this number divides the steps done, and where the process is asked to end;
        None is returned otherwise.

    Raises:
        ParallelError: every is no whole number from 1 on; no path, or something else lies there.
        CheckpointError: it can't be written; a checkpoint that had the path before is there still.
    """
    world = par.world
    if every is not None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ParallelError(f"every={every!r}: it is a whole number of steps from 1 on.")
        leaving.listen(saves=True)
    # Rank 0's look for all: the others may be asked a moment later.
    asked = from_first(leaving.asked()) if every is not None or REQUEST_VARIABLE in os.environ else None
    if every is not None and asked is None and par.progress.steps % every:
        return None
    wait(par)
    par.settle_buffers()
    held = hold(par)
    target = Path(path) if path is not None else folders.step_path(folders.steps_dir(), par.progress.steps)
    record = merge_records(_gather_records(held))
    record |= {
        "format": FORMAT,
        "torch": str(torch.__version__),
        "optimizer": _kind(par.optimizer),
        "layout": str(world.layout),
        "state": par.state(),
        "averages": [average.state for average in par.averages],
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
    }
    packed = on_rank_0(world, lambda: _pack(record), "") or b""
    saving, folder = begin(world, target, f"the checkpoint {str(target)!r}")
    job = Background(world, tensors(held), folder, saving, packed, threaded=asynchronous and asked is None)
    if job.is_running:
        _background[par] = job
    else:
        raise_agreed(job.error)
    if asked is not None:
        leaving.leave(asked)
    return target


def wait(par: ParallelHandle) -> None:
    """Return once no save is under way.

    Raises:
        CheckpointError: the last one has failed.
    """
    job = _background.pop(par, None)
    if job is not None:
        job.join()
        raise_agreed(job.error)


def load(par: ParallelHandle, path: str | Path | None = None, *, schedulers: Sequence[Any] = ()) -> bool:
    """Go on from a checkpoint, with model, optimizer, progress and random streams as they were; True if there was one.

    path: None takes the newest complete one in the folder that PACELINE_CHECKPOINT_DIR names; False if there is none.
    schedulers: the same, in the same order, as were saved.

    Raises:
        ParallelError: there is nothing at the path, or it is of another model or optimizer; nothing has been changed.
        CheckpointError: it can't be read; nothing has been changed.
    """
    world = par.world
    wait(par)
    # Rank 0 looks for all: another rank might already see a newer checkpoint. An error is held back until all ranks know
    # of it; a rank that raised by itself would leave the others in the next collective.
    found = from_first(on_all(lambda: _find(path) if world.rank == 0 else None))
    if found is None:
        return False
    folder = Path(found)
    held = hold(par)
    record, saved = on_all(lambda: _read_about(folder))
    _compare(par, held, folder, record, saved, len(schedulers))
    buffers = targets(held, saved)
    on_all(lambda: _read_tensors(world, folder, buffers))
    # Until here nothing of the training was changed: all is read into buffers of its own, and all ranks have said that
    # they could.
    put_back(held, buffers, record)
    par.load_state(record["state"])
    for average, own in zip(par.averages, record.get("averages", ()), strict=False):
        average.state = own
    for scheduler, state in zip(schedulers, record["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    return True


def full_state_dict(par: ParallelHandle) -> dict[str, Tensor]:
    """Every parameter and kept buffer, whole, on the CPU, under each of its names: for `load_state_dict` of the plain model."""
    return _full_state_dict(hold(par), par.world)


def hold(par: ParallelHandle) -> HeldState:
    """This rank's part of the model and its optimizer."""
    executor = par.executor
    # FSDP2 leaves parameters whole for a while after a forward pass. To ask it for the state puts them in parts again,
    # and so this comes first.
    executor.module.state_dict(keep_vars=True)
    return HeldState(
        module=executor.module,
        parameters=executor.named_parameters(),
        optimizer=par.optimizer,
        averages=[average.tensors for average in par.averages],
    )


def _pack(record: dict[str, Any]) -> bytes:
    """The record as it is written.

    Raises:
        ParallelError: something in it could not be read again without running code.
    """
    file = io.BytesIO()
    try:
        torch.save(record, file)
        file.seek(0)
        # It is read back at once: better that save() refuses an object than that load() does, days later.
        torch.load(file, weights_only=True)
    except Exception as error:
        kind = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise _not_plain(kind[1] if kind else str(error)) from error
    return file.getvalue()


def _not_plain(kind: str) -> ParallelError:
    return ParallelError(
        "a scheduler, a module's extra state or the optimizer has something in its state_dict that is neither a number, a "
        f"text, a list, a dict nor a tensor: {kind}. Leave it out, or keep it elsewhere."
    )


def _find(path: str | Path | None) -> str | None:
    if path is None:
        newest = folders.newest(folders.steps_dir())
        if newest is None:
            return None
        path = newest
    found = folders.find(Path(path).absolute())
    if found is None:
        what = "has no complete checkpoint" if Path(path).exists() else "is not there"
        raise ParallelError(
            f"{str(path)!r} {what}. Give the path that save() was given; a save that was cut short leaves nothing to load."
        )
    return str(found)


def _read_about(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[torch.Size, torch.dtype]]]:
    """The record, and key -> shape and type of each tensor."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not (folder / RECORD).exists():
        raise ParallelError(
            f"{str(folder)!r} has no {RECORD}: it was not written by save(), or is not visible on every rank. Checkpoints lie "
            "on a file system that all ranks share."
        )
    record = torch.load(folder / RECORD, weights_only=True, map_location="cpu")
    if record["format"] != FORMAT:
        raise ParallelError(
            f"{str(folder)!r} has the format {record['format']}; this version of Paceline reads {FORMAT}."
        )
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    return record, {
        key: (about.size, about.properties.dtype)
        for key, about in metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }


def _compare(
    par: ParallelHandle,
    held: HeldState,
    folder: Path,
    record: dict[str, Any],
    saved: dict[str, tuple[torch.Size, torch.dtype]],
    schedulers: int,
) -> None:
    own = {name: tensor.shape for name, tensor in held.model_tensors().items()}
    together: dict[str, torch.Size] = {}
    for of_rank in gather(own):
        together |= of_rank
    shapes = {key.removeprefix("model."): shape for key, (shape, _) in saved.items() if key.startswith("model.")}
    message = mismatch(together, _kind(par.optimizer), record, shapes)
    message = message or next(filter(None, gather(groups_mismatch(held, record))), "")
    if not message and len(record["schedulers"]) != schedulers:
        message = f"it has the states of {len(record['schedulers'])} schedulers, and load() was given {schedulers}"
    averages = len(record.get("averages", ()))
    if not message and averages != len(par.averages) and par.optimizer is not None:
        message = (
            f"it has {averages} averages, and this training {len(par.averages)}: call par.average() as often before load(), or "
            "after it to begin another"
        )
    if message:
        raise ParallelError(
            f"the checkpoint {str(folder)!r} is not one of this training: {message}. Nothing has been changed; load it "
            "into the model that it was saved from."
        )


def _read_tensors(world: World, folder: Path, buffers: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as read

    with warnings.catch_warnings():
        # torch warns that it assumes a single process, for there is no process group. There is a single process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            read(buffers, storage_reader=FileSystemReader(folder), no_dist=world.size == 1)
        except CheckpointException as error:  # a BaseException
            raise CheckpointError(
                f"{str(folder)!r} can't be read: {reason(error)}. Nothing has been changed."
            ) from error


# What all ranks have to agree on.


def _gather_records(held: HeldState) -> list[dict[str, Any]]:
    try:
        return gather(own_record(held))
    except NotPlainError as error:
        raise _not_plain(error.kind) from error


def begin(world: World, target: Path, what: str) -> tuple[Saving | None, Path]:
    """The save that rank 0 has begun, None elsewhere, and the folder that all write to. what: the target in messages."""
    saving = on_rank_0(world, lambda: Saving(target.absolute()), f"{what} can't be begun")
    return saving, Path(from_first(str(saving.folder) if saving is not None else ""))


def on_rank_0(world: World, action: Callable[[], _T], what: str) -> _T | None:
    """Do the action on rank 0 alone: its result there, None elsewhere; its error is raised on all."""

    def on_this() -> _T | None:
        try:
            return action() if world.rank == 0 else None
        except OSError as error:
            raise CheckpointError(f"{what}: {error.strerror or error}.") from error

    return on_all(on_this)


def on_all(action: Callable[[], _T]) -> _T:
    """The action's result; where it fails on a rank, the error of the first such one is raised on all."""
    try:
        result = action()
    except Exception as error:
        # Within this clause, and not noted for after it: an error that this frame keeps would keep the frame, and with it what
        # was read, until Python looks for such circles.
        raise_agreed(error)
        raise
    raise_agreed(None)
    return result


def raise_agreed(error: Exception | None) -> None:
    """Raise on all ranks the error of the first that has one."""
    described = None if error is None else (isinstance(error, ParallelError), _text(error))
    found = next((item for item in gather(described) if item is not None), None)
    if found is not None:
        kind = ParallelError if found[0] else CheckpointError
        # An error of this class says it all already, and needs no second traceback around it.
        raise kind(found[1]) from (None if type(error) is kind and str(error) == found[1] else error)


def _text(error: Exception) -> str:
    if isinstance(error, (ParallelError, CheckpointError)):
        return str(error)
    return f"the checkpoint can't be read: {reason(error)}. Nothing has been changed."


def _kind(optimizer: object) -> str:
    return "" if optimizer is None else type(optimizer).__name__
