"""Save and load checkpoints of any layout.

    save    1  rank 0 makes a temporary folder beside the path               checkpoint.folder
            2  each rank writes its part; copies are written only once       checkpoint.parts
            3  rank 0 renames the folder to the path once all parts exist
    load    1  compare names, shapes and parameter groups; nothing is changed yet
            2  every rank reads its part into new memory                     checkpoint.parts
            3  restore model, optimizer, progress and schedulers

After each call of `save` with `every`, a process that outlives the workers may keep the state in its memory. `load` prefers this
state to older checkpoints on the disk (checkpoint.kept).

The file `paceline.pt` has all data except tensors. `load` also reads format 1, in which `torch.distributed.checkpoint`
wrote the tensors. Every rank must call every function. Errors are the same on each rank.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.checkpoint import leaving
from paceline.checkpoint.api import END_S, SAVE_S
from paceline.checkpoint.neighbour import Neighbour
from paceline.errors import PacelineError
from paceline.parallel.checkpoint import folder as folders
from paceline.parallel.checkpoint import kept
from paceline.parallel.checkpoint.folder import RECORD, Save, Saving, reason
from paceline.parallel.checkpoint.parts import Box, SavedParts, Shapes, TensorPiece, encoded, pieces_of, writers
from paceline.parallel.checkpoint.state import (
    CheckpointRecord,
    HeldState,
    OwnRecord,
    Resumable,
    groups_mismatch,
    merge_records,
    mismatch,
    order_mismatch,
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

#: The version of the file format of checkpoints.
FORMAT = 2

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def save(
    par: ParallelHandle,
    path: str | Path | None = None,
    *,
    asynchronous: bool | None = None,
    schedulers: Sequence[Resumable] = (),
    every: int | None = None,
) -> Path | None:
    """Save a checkpoint. Return its path, or None if nothing was saved.

    The checkpoint is complete when this returns, or with `asynchronous` when `wait` returns. The process ends after the
    save if an elastic run continues with more nodes, or if SIGTERM came after the first call with `every`.

    Args:
        par: The model in its layout.
        path: A folder to make, or to replace once the new checkpoint is complete, on a file system that all ranks share. None
            takes `step_<n>` in the folder PACELINE_CHECKPOINT_DIR, where n is the number of finished steps.
        asynchronous: Write while training continues. The next save waits until this one is complete. None means True if
            `every` is given, and otherwise False.
        schedulers: Learning-rate schedulers, or other objects with `state_dict` and `load_state_dict`.
        every: Save only if this number divides the number of finished steps, or if the process has to end. With
            `every`, call `save` after each step.

    Raises:
        ParallelError: `every` is not an integer of at least 1, there is no path, or the path exists and is not a checkpoint.
        CheckpointError: The write failed. A previous checkpoint at the path is untouched. With `asynchronous` or `every` the
            error is only logged, and training continues.
    """
    if every is not None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ParallelError(f"every={every!r} must be an integer of at least 1, the number of steps.")
        leaving.listen(saves=True)
    pace, asked, digests = _paces.setdefault(par, _Pace()), None, [""]
    is_kept = every is not None and path is None and asynchronous is not False
    own = _OwnPieces.of(par) if is_kept and kept.is_due(pace.neighbour, par.progress.steps) else None
    if every is not None or REQUEST_VARIABLE in os.environ:
        answers = gather((leaving.asked(), own.digest if own is not None else ""))
        # Use rank 0's answer on all ranks, because a request to end the run may reach other ranks later.
        asked, digests = answers[0][0], [digest for _, digest in answers]
    step_s, is_due = pace.step_s(), every is None or asked is not None or par.progress.steps % every == 0
    goes_on = (every is not None if asynchronous is None else asynchronous) and asked is None
    target: Path | None = None
    if is_due:
        try:
            target = Path(path) if path is not None else folders.step_path(folders.steps_dir(), par.progress.steps)
            _save(par, target, schedulers, pace, step_s, goes_on=goes_on)
        except CheckpointError as error:
            if every is None and not goes_on:
                raise
            _log.error("%s Training continues.", error)
            target = None
    elif pace.returned is None and goes_on:
        folders.camera.prepare(encoded(pieces_of(tensors(hold(par))))[1])
    # Keep the state in memory only if all ranks can: an incomplete state would take the place of an older one.
    if own is not None and all(digests) and asked is None:
        _keep(par, own, digests, schedulers, pace, step_s)
    if asked is not None:
        leaving.leave(asked)
    pace.returned = time.monotonic()
    return target


class _Pace:
    """A record of one training's calls of `save` and `load`.

    Attributes:
        loads: The number of calls of `load`.
    """

    def __init__(self) -> None:
        self.loads = 0
        self.neighbour = Neighbour()
        self.returned: float | None = None
        self.running: Save | None = None
        self.digests: list[str] = []
        self._writers: dict[Box, int] = {}

    def step_s(self) -> float | None:
        return None if self.returned is None else time.monotonic() - self.returned

    def mine(self, rank: int, own: _OwnPieces, digests: list[str]) -> list[TensorPiece]:
        """Return the pieces of tensors that this rank writes.

        `own` has this rank's pieces, and `digests` the `digest` of every rank's `own`. Every rank must call this if a digest has
        changed since the last call: the ranks then choose again which rank writes each piece.
        """
        if digests != self.digests:
            self._writers = writers(
                [
                    [(key, tuple(corner), tuple(shape), size) for key, corner, shape, size in of_rank]
                    for of_rank in gather(own.boxes)
                ]
            )
            self.digests = digests
        return [piece for piece in own.pieces if self._writers[piece.box] == rank]


@dataclass(frozen=True)
class _OwnPieces:
    """This rank's training state, cut into the pieces that checkpoints store.

    Attributes:
        digest: A hash of the pieces' names, their shapes, and their positions in whole tensors.
        cpu_s: The CPU seconds that it took to make this object.
    """

    held: HeldState
    pieces: Sequence[TensorPiece]
    boxes: list[Box]
    digest: str
    cpu_s: float

    @classmethod
    def of(cls, par: ParallelHandle) -> _OwnPieces:
        began_s, held = time.thread_time(), hold(par)
        pieces = pieces_of(tensors(held))
        boxes = [piece.box for piece in pieces]
        digest = hashlib.sha256(repr(boxes).encode()).hexdigest()
        return cls(held, pieces, boxes, digest, time.thread_time() - began_s)


_paces: WeakKeyDictionary[ParallelHandle, _Pace] = WeakKeyDictionary()


def _save(
    par: ParallelHandle,
    target: Path,
    schedulers: Sequence[Resumable],
    pace: _Pace,
    step_s: float | None,
    *,
    goes_on: bool,
) -> None:
    world = par.world
    if (problem := _settled(par, SAVE_S)) and pace.running is not None:
        raise CheckpointError(f"the checkpoint {str(target)!r} is left out: {problem}")
    par.settle_buffers()
    own = _OwnPieces.of(par)
    records, digests = zip(*_gather_records(own.held, own.digest), strict=True)
    record = _record(par, merge_records([*records]), schedulers)
    mine = pace.mine(world.rank, own, [*digests])
    packed = on_rank_0(world, lambda: _pack(record), "") or b""
    saving, folder = begin(world, target, f"the checkpoint {str(target)!r}")
    job = Save(world, folder, saving, packed)
    if goes_on:
        try:
            on_all(lambda: job.start(mine, step_s))
        except BaseException:
            job.give_up()
            raise
        pace.running = job
        return
    try:
        on_all(lambda: job.write(mine))
        on_rank_0(world, job.finish, f"the checkpoint {str(target)!r} can't be completed")
    except BaseException:
        job.abandon()
        raise


def _record(par: ParallelHandle, values: OwnRecord, schedulers: Sequence[Resumable]) -> CheckpointRecord:
    return {
        **values,
        "format": FORMAT,
        "torch": str(torch.__version__),
        "optimizer": _kind(par.optimizer),
        "layout": str(par.world.layout),
        "state": par.state(),
        "averages": [average.state for average in par.averages],
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
    }


def _keep(
    par: ParallelHandle,
    own: _OwnPieces,
    digests: list[str],
    schedulers: Sequence[Resumable],
    pace: _Pace,
    step_s: float | None,
) -> None:
    """Keep this rank's state in another process's memory. Every rank must call this."""
    began_s = time.thread_time()
    par.settle_buffers()
    mine = pace.mine(par.world.rank, own, digests)
    record = _record(par, own_record(own.held), schedulers)
    about = kept.about(par.world, par.progress.steps, pace.loads)
    spent_s = own.cpu_s + time.thread_time() - began_s
    pace.neighbour.keep(about, lambda: kept.encode(mine, record), step_s, spent_s)


def loads_of(par: ParallelHandle) -> int:
    """Return how often this training has called `load`."""
    return _paces.setdefault(par, _Pace()).loads


def regrouped(par: ParallelHandle, loads: int, *, is_new: bool) -> None:
    """Drop the save in progress, because a lost rank may not have written its part.

    Every rank must call this. loads: Calls of `load` on the ranks that stayed. is_new: Whether this rank replaces a lost rank.
    """
    pace = _paces.setdefault(par, _Pace())
    if pace.running is not None:
        pace.running.drop()
    pace.loads, pace.running, pace.digests = loads, None, []
    if is_new:
        pace.returned = time.monotonic()


def wait(par: ParallelHandle) -> None:
    """Wait until the save in progress, if any, is complete.

    Raises:
        CheckpointError: The last save failed, or its disk hangs.
    """
    if problem := _settled(par, END_S):
        raise CheckpointError(problem)


def _settled(par: ParallelHandle, patience_s: float) -> str:
    """Wait for the save in progress. Return why it failed, or "".

    Every rank must call this. A save that makes no progress for `patience_s` counts as failed.
    """
    pace = _paces.setdefault(par, _Pace())
    job = pace.running
    if job is None:
        return ""
    has_ended = job.settle(patience_s)
    everyone = gather((has_ended, str(job.error or "")))
    problems = [text for _, text in everyone if text]
    problem = next((text for text in problems if folders.ANOTHERS not in text), *problems[:1] or [""])
    if not problem and not all(ended for ended, _ in everyone):
        return "the one before is not yet written, and a disk takes no bytes."
    if not has_ended:
        # Stop waiting for the other ranks' parts: a rank that has failed writes no part, and may be unable to report its failure.
        job.give_up()
    pace.running = None
    return problem


def load(par: ParallelHandle, path: str | Path | None = None, *, schedulers: Sequence[Resumable] = ()) -> bool:
    """Restore model, optimizer, progress and random streams from a checkpoint.

    Return False if `path` is None and there is no checkpoint, else True. If loading fails, nothing is changed.

    Args:
        par: The model in its layout.
        path: The checkpoint. None takes the newest complete checkpoint in the folder PACELINE_CHECKPOINT_DIR, if there is one.
            Before the first save it prefers a newer state that all workers of the last attempt have kept in memory.
        schedulers: The objects that `save` got as `schedulers`, in the order of that call.

    Raises:
        ParallelError: The path has no checkpoint, or the checkpoint of another model or optimizer.
        CheckpointError: The checkpoint cannot be read.
    """
    world = par.world
    _settled(par, END_S)
    # Only rank 0 searches, because other ranks might already see a newer checkpoint. If the search fails, raise an error on all
    # ranks, because the other ranks would wait for rank 0 in the next collective.
    name = from_first(on_all(lambda: _find(path) if world.rank == 0 else None))
    pace = _paces.setdefault(par, _Pace())
    pace.loads += 1
    # Use the state in memory only at the start of an attempt: a later load() goes back to a checkpoint on the disk.
    if path is None and pace.returned is None and _load_kept(par, name, schedulers):
        return True
    if name is not None:
        _restore(par, Path(name), lambda: _read_about(Path(name)), schedulers)
    return name is not None


def _load_kept(par: ParallelHandle, name: str | None, schedulers: Sequence[Resumable]) -> bool:
    """Restore the newest state kept in memory, and return True, if it is newer than checkpoint `name`."""
    found = on_all(kept.newest)
    steps = gather(-1 if found is None else found.step)
    if found is None or min(steps) != max(steps) or found.step <= (folders.step_of(Path(name)) if name else -1):
        return False
    newest = found
    try:
        _restore(par, folders.step_path(Path("memory"), found.step), lambda: kept.read(newest), schedulers)
    except CheckpointError as error:
        _log.warning("the state of step %d in memory is not used: %s", found.step, error)
        return False
    return True


def _restore(
    par: ParallelHandle,
    folder: Path,
    read_about: Callable[[], tuple[CheckpointRecord, SavedParts | None, Shapes]],
    schedulers: Sequence[Resumable],
) -> None:
    world = par.world
    held = hold(par)
    record, parts, saved = on_all(lambda: _unchanged(read_about))
    _compare(par, held, folder, record, saved, len(schedulers))
    buffers = targets(held, saved)
    read = partial(_read_tensors, world, folder) if parts is None else parts.read_into
    on_all(lambda: _unchanged(lambda: read(buffers)))
    # Change the model and the optimizer only now, after every rank has read all of its data into new memory.
    put_back(held, buffers, record)
    par.load_state(record["state"])
    for average, own in zip(par.averages, record.get("averages", ()), strict=False):
        average.state = own
    for scheduler, state in zip(schedulers, record["schedulers"], strict=True):
        scheduler.load_state_dict(state)


def full_state_dict(par: ParallelHandle) -> dict[str, Tensor]:
    """Return each whole parameter and persistent buffer by name, on the CPU.

    The plain model's `load_state_dict` accepts the result.
    """
    return _full_state_dict(hold(par), par.world)


def hold(par: ParallelHandle) -> HeldState:
    """Return this rank's part of the model, optimizer and weight averages."""
    executor = par.executor
    # FSDP2 leaves some parameters whole after a forward pass. Calling `state_dict` makes FSDP2 split these parameters again.
    executor.module.state_dict(keep_vars=True)
    return HeldState(
        module=executor.module,
        parameters=executor.named_parameters(),
        optimizer=par.optimizer,
        averages=[average.tensors for average in par.averages],
    )


def _pack(record: CheckpointRecord) -> bytes:
    """Serialize a checkpoint's record. Raise ParallelError if it is not plain data."""
    file = io.BytesIO()
    try:
        torch.save(record, file)
        file.seek(0)
        # Read the record back: if it holds an object that load() would refuse, save() must fail now.
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
    if path is None and (path := folders.newest(folders.steps_dir())) is None:
        return None
    folder = folders.find(Path(path).absolute())
    if folder is None:
        what = "has no complete checkpoint" if Path(path).exists() else "is not there"
        raise ParallelError(
            f"{str(path)!r} {what}. Give the path that save() was given; a save that was cut short leaves nothing to load."
        )
    return str(folder)


def _unchanged(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except CheckpointError as error:
        raise CheckpointError(f"{error} Nothing was changed.") from error


def _read_about(folder: Path) -> tuple[CheckpointRecord, SavedParts | None, Shapes]:
    """Return a checkpoint's record, parts (None in format 1), and key -> (shape, dtype)."""
    if not (folder / RECORD).exists():
        raise ParallelError(
            f"{str(folder)!r} has no {RECORD}: save() did not write it, or it is not visible on every rank. "
            "Checkpoints must be on a file system that all ranks share."
        )
    record: CheckpointRecord = torch.load(folder / RECORD, weights_only=True, map_location="cpu")
    if record["format"] not in (1, FORMAT):
        raise ParallelError(
            f"{str(folder)!r} has the format {record['format']}; this version of Paceline reads format {FORMAT}."
        )
    if record["format"] == FORMAT:
        parts = SavedParts(folder)
        return record, parts, parts.about
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    about = {
        key: (entry.size, entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return record, None, about


def _compare(
    par: ParallelHandle, held: HeldState, folder: Path, record: CheckpointRecord, saved: Shapes, schedulers: int
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
    message = message or order_mismatch(par.state()["order"], record["state"])
    if message:
        raise ParallelError(
            f"the checkpoint {str(folder)!r} is not one of this training: {message}. Nothing was changed; load it "
            "into the model that it was saved from."
        )


def _read_tensors(world: World, folder: Path, buffers: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as read

    with warnings.catch_warnings():
        # Without a process group torch warns that it assumes a single process, which is right.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            read(buffers, storage_reader=FileSystemReader(folder), no_dist=world.size == 1)
        except CheckpointException as error:  # unlike most errors, it derives from BaseException
            raise CheckpointError(f"{str(folder)!r} can't be read: {reason(error)}.") from error


# The functions below make all ranks agree on a result, or raise the same error on all ranks.


def _gather_records(held: HeldState, digest: str) -> list[tuple[OwnRecord, str]]:
    try:
        return gather((own_record(held), digest))
    except NotPlainError as error:
        raise _not_plain(error.kind) from error


def begin(world: World, target: Path, what: str) -> tuple[Saving | None, Path]:
    """Make the temporary folder of a save to `target`.

    Return rank 0's `Saving` object (None on other ranks), and the folder. `what` describes the save in error messages.
    """
    saving = on_rank_0(world, lambda: Saving(target.absolute()), f"{what} can't be begun")
    try:
        return saving, Path(from_first(str(saving.folder) if saving is not None else ""))
    except BaseException:
        if saving is not None:
            saving.abandon()
        raise


def on_rank_0(world: World, action: Callable[[], _T], what: str) -> _T | None:
    """Call `action` on rank 0. Raise its error on every rank.

    Return the action's result on rank 0, None elsewhere. `what` begins the error message for an OSError.
    """

    def on_this() -> _T | None:
        try:
            return action() if world.rank == 0 else None
        except OSError as error:
            raise CheckpointError(f"{what}: {error.strerror or error}.") from error

    return on_all(on_this)


def on_all(action: Callable[[], _T]) -> _T:
    """Call `action` on every rank.

    Return the result of this rank's call. If a rank's call fails, all ranks raise the error.
    """
    try:
        result = action()
    except Exception as error:
        # Raise the error here: a variable with the error would keep this frame's data in memory until a garbage collection.
        raise_agreed(error)
        raise
    raise_agreed(None)
    return result


def raise_agreed(error: Exception | None) -> None:
    """Raise the first failed rank's error on all ranks.

    Every rank calls this. Ranks without an error pass None.
    """
    described = None if error is None else (isinstance(error, ParallelError), _text(error))
    for is_users, text in filter(None, gather(described)):
        kind = ParallelError if is_users else CheckpointError
        # Don't show `error` as the cause of the new error if both errors have the same class and text.
        raise kind(text) from (None if type(error) is kind and str(error) == text else error)


def _text(error: Exception) -> str:
    if isinstance(error, PacelineError):
        return str(error)
    return f"the checkpoint can't be read: {reason(error)}. Nothing was changed."


def _kind(optimizer: object) -> str:
    return "" if optimizer is None else type(optimizer).__name__
