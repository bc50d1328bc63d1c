"""The functions `save`, `wait` and `latest`, and the checkpoint that `latest` returns.

A save first copies the state to an image in memory. By default a thread writes the image to the disk while training continues.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, overload

from paceline.checkpoint import files, leaving
from paceline.checkpoint.background import END_S, SAVE_S, BackgroundWrite
from paceline.checkpoint.image import Camera
from paceline.checkpoint.leaving import TimeLimit
from paceline.checkpoint.neighbour import Neighbour, newest
from paceline.checkpoint.values import DenseArray, decode_state, encode_state, is_tensor
from paceline.data.sampling.world import own_rank
from paceline.errors import CheckpointError, UserError
from paceline.system import step_clock

if TYPE_CHECKING:
    from paceline.system.kept_states import State

_log = logging.getLogger(__name__)
#: Key prefixes in torch's key-value store. _SAID: rank 0 announces when all ranks end. _WHOLE: a rank has written its part.
_SAID, _WHOLE = "paceline_checkpoint_said", "paceline_checkpoint_whole"
#: Before its process ends, a rank waits up to this many seconds for all ranks to write their parts of the checkpoint.
_PARTS_S = 600.0


_writing: BackgroundWrite | None = None
_camera = Camera()
_neighbour = Neighbour()
#: Monotonic time at which the last call of save() returned, or None before the first call.
_returned: float | None = None
_limit = TimeLimit()
_last: tuple[Path, files.CheckpointPart] | None = None
_calls = 0
_announced: tuple[int, str] | None = None
_heeded = 0
#: Checkpoint folders that have a newer step than the step being saved, and about which a warning was printed.
_warned: set[Path] = set()


def save(
    state: object,
    step: int,
    *,
    every: int | None = None,
    keep: int = 3,
    asynchronous: bool = True,
    parts: bool = False,
    folder: str | os.PathLike[str] | None = None,
) -> bool:
    """Save the state. Return True if this rank has saved it.

    With `every`, call this after each step. It also saves after SIGTERM, shortly before a known time limit, and before
    an elastic run restarts with more nodes. After SIGTERM and before such a restart it then ends the process.

    A full or hanging disk does not end the training: the failure is logged, previous checkpoints stay, and the next
    call tries again. Only `wait()`, and `save` with `asynchronous=False` and without `every`, raise the failure.

    Args:
        state: A value to save, usually a dict. Values are objects with `state_dict` and `load_state_dict` (models,
            optimizers, schedulers, samplers), tensors, numpy arrays, numbers, strings, and lists, tuples, sets and
            dicts of these. Or a function that returns the state; it is called only when a checkpoint is written. `save`
            reads the state only before it returns.
        step: The number of finished steps or epochs, an integer. The checkpoint with the largest step is the newest. A save
            replaces an existing checkpoint of the same step, except with `parts`.
        every: Save if `step` is a multiple of this number, and in the cases above. None saves in each call.
        keep: How many of the newest checkpoints to keep. Older checkpoints are removed after each save.
        asynchronous: Write the file while training continues. `save` first copies the state or, if it is large, forks a
            process that copies it. The next save waits until this save is complete.
        parts: Each rank saves its own state, and all ranks must call `save` equally often. By default only rank 0
            saves, and `save` returns False on other ranks.
        folder: The folder of the checkpoints. Default: the run's folder (PACELINE_CHECKPOINT_DIR), or `./checkpoints`.

    Raises:
        UserError: The state holds an unsupported value (the message names its place), or a number is out of range.
        CheckpointError: The write failed, with `asynchronous=False` and without `every`. Previous checkpoints are untouched.

    Examples:
        >>> from paceline import checkpoint
        >>> checkpoint.save({"weights": [1.0, 2.0]}, step=1, folder="checkpoints")
        True
    """
    global _calls, _returned
    _check(step, every, keep)
    place, step = files.folder_of(folder), int(step)
    rank, size = own_rank()
    writers = size if parts else 1
    _calls += 1
    leaving.listen(saves=rank < writers)
    if rank >= writers:
        if leaving.asked() is not None:
            leaving.follow()
        return False
    asked, part = leaving.asked() or _limit.asked(), files.CheckpointPart(step)
    if writers > 1:
        asked = _agreed(asked, rank)
        part = files.CheckpointPart(step, rank, size, attempt_token())
    is_due = every is None or step % every == 0 or asked is not None
    step_s = None if _returned is None else time.monotonic() - _returned
    if not is_due and asynchronous and _calls == 1 and not _is_function(state):
        _camera.prepare(_plain(state)[1])
    # Write this rank's part of a step only once: with older parts of other ranks, the checkpoint would be mixed.
    if is_due and (part.of == 1 or _last != (place, part)):
        with step_clock.counted(step_clock.SAVE):
            error = _save(state, place, part, (keep, rank, writers), step_s, goes_on=asynchronous and asked is None)
        if error is not None and not asynchronous and every is None and asked is None:
            raise error
        is_due = error is None
    if asked is None and every is not None and asynchronous and _neighbour.is_due(step, place):
        _keep(state, place, part, step_s)
    if asked in (leaving.SIGNAL, leaving.RESIZE):
        _settled(SAVE_S)
        if parts:
            _await_all(rank, size)
        leaving.leave(asked, followers=size - writers)
    _returned = time.monotonic()
    return is_due


def wait() -> None:
    """Wait until the save in progress, if any, is complete.

    Raises:
        CheckpointError: The last save failed, or its disk hangs.

    Examples:
        >>> from paceline import checkpoint
        >>> checkpoint.wait()
    """
    writing = _writing
    with step_clock.counted(step_clock.SAVE):
        if not _settled(END_S):
            raise CheckpointError(f"no checkpoint is complete yet: the disk has taken no byte for {END_S:.0f} s.")
    if writing is not None and writing.error is not None:
        raise writing.error


def _settled(patience_s: float) -> bool:
    global _writing
    if _writing is not None and not _writing.settle(patience_s):
        return False
    _writing = None
    return True


def _check(step: object, every: object, keep: object) -> None:
    for name, value, least in (("step", step, 0), ("every", 1 if every is None else every, 1), ("keep", keep, 1)):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
            raise UserError(f"{name}={value!r} must be an integer of at least {least}.")


def _is_function(state: object) -> TypeGuard[Callable[[], object]]:
    return callable(state) and not hasattr(state, "state_dict")


def _plain(state: object) -> tuple[object, list[DenseArray]]:
    content, arrays = encode_state(state() if _is_function(state) else state)
    return content, [DenseArray(name, array) for name, array in arrays.items()]


def _save(
    state: object,
    place: Path,
    part: files.CheckpointPart,
    kept: tuple[int, int, int],
    step_s: float | None,
    *,
    goes_on: bool,
) -> CheckpointError | None:
    """Write the checkpoint file `part` into `place`. Return the error, or None. `goes_on`: write in a thread."""
    global _last, _writing
    try:
        if not _settled(SAVE_S):
            raise CheckpointError(
                f"the checkpoint {part.name!r} is left out, because the one before is not yet written."
            )
        content, arrays = _plain(state)
        _last = (place, part)
        if not goes_on:
            _write(place, part, kept, lambda path: files.write_file(path, content, arrays))
            return None
        try:
            image = _camera.take(files.header_of(content, arrays), arrays, step_s)
        except OSError as error:
            raise _unwritten(place, part, error) from error
    except CheckpointError as error:
        _last = None
        _log.error("%s", error)
        return error

    def work(moves: Callable[[], None]) -> None:
        try:

            def put(path: Path) -> None:
                image.wait()
                files.write_image(path, image.bytes(), moves)

            _write(place, part, kept, put)
        finally:
            _camera.give_back(image)

    _writing = BackgroundWrite(work)
    return None


def _keep(state: object, place: Path, part: files.CheckpointPart, step_s: float | None) -> None:
    """Send the state to a process that keeps it for the next attempt."""

    def encoded() -> tuple[bytes, list[DenseArray]]:
        content, arrays = _plain(state)
        return files.header_of(content, arrays), arrays

    about: State = {"folder": str(place), "step": part.step, "rank": part.rank, "of": part.of, "token": attempt_token()}
    _neighbour.keep(about, encoded, step_s)


def _write(place: Path, part: files.CheckpointPart, kept: tuple[int, int, int], put: Callable[[Path], None]) -> None:
    global _last
    began = time.monotonic()
    try:
        place.mkdir(parents=True, exist_ok=True)
        files.remove_leftovers(place)
        _warn_of_newer(place, part.step)
        put(place / part.name)
    except OSError as error:
        _last = None
        raise _unwritten(place, part, error) from error
    files.remove_old(place, *kept, but=part)
    _limit.took(time.monotonic() - began)


def _unwritten(place: Path, part: files.CheckpointPart, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {part.name!r} could not be written to {str(place)!r}: {error.strerror or error}. "
        "Former checkpoints are untouched. Free space, or give another folder=."
    )


def _warn_of_newer(place: Path, step: int) -> None:
    newest = max(files.whole(files.parts_in(place)), default=step)
    if newest > step and place not in _warned:
        _warned.add(place)
        _log.warning(
            "the checkpoint of step %d is older than that of step %d, which %r has already: latest() gives that one, and of "
            "older ones only the last stays. Go on from latest(), or give another folder=.",
            step,
            newest,
            str(place),
        )


def attempt_token() -> str:
    """Return a token, equal on all ranks of an attempt, for file names."""
    names = ("PACELINE_RUN_ID", "PACELINE_ATTEMPT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    values = [os.environ.get(name, "") for name in (*names, "MASTER_ADDR", "MASTER_PORT")]
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:8]


def _agreed(asked: str | None, rank: int) -> str | None:
    """Return the reason to end on which all ranks have agreed, or None.

    Rank 0 announces its reason `asked`. All ranks end at rank 0's next call of save(), because another rank may be one
    call ahead. Without torch's key-value store each rank decides alone, so the last checkpoint may lack parts.
    """
    global _announced, _heeded
    store = leaving.default_store()
    if store is None:
        return asked
    name = f"{_SAID}_{_heeded}"
    if _announced is None and rank == 0 and asked is not None:
        _announced = (_calls + 1, asked)
        store.set(name, f"{_calls + 1} {asked}")
    elif _announced is None and rank != 0 and store.check([name]):
        call, _, why = store.get(name).decode().partition(" ")
        _announced = (int(call), why)
    if _announced is None or _calls < _announced[0]:
        return None
    why, _announced, _heeded = _announced[1], None, _heeded + 1
    return why


def _await_all(rank: int, size: int) -> None:
    store = leaving.default_store()
    if store is None:
        return
    names = [f"{_WHOLE}_{_heeded}_{other}" for other in range(size)]
    try:
        store.set(names[rank], "1")
        store.wait(names, timedelta(seconds=_PARTS_S))
    except Exception as error:
        _log.warning("not every rank has written its part of the last checkpoint: %s", str(error).splitlines()[:1])


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, as `latest` finds it.

    Attributes:
        step: The `step` that was given to save().
        paths: The files, one for each rank that has saved a part. For a state in memory: /proc/self/fd/<n>.

    Examples:
        >>> from paceline import checkpoint
        >>> checkpoint.save({"weights": [1.0, 2.0]}, step=7, folder="checkpoints")
        True
        >>> checkpoint.latest("checkpoints").state
        {'weights': [1.0, 2.0]}
    """

    step: int
    paths: tuple[Path, ...]

    @cached_property
    def state(self) -> Any:
        """Return the saved state, with tensors on the CPU.

        Objects with `state_dict` are replaced by that method's result. For saved parts, return this rank's part.

        Raises:
            CheckpointError: The file cannot be read, or the checkpoint is in parts and the number of ranks has changed.
        """
        rank, size = own_rank() if len(self.paths) > 1 else (0, 1)
        if size != len(self.paths):
            raise CheckpointError(
                f"the checkpoint of step {self.step} has a part for each of {len(self.paths)} ranks, and there "
                f"are {size} now. Build this rank's state from `.parts`, the states of all ranks."
            )
        return self.parts[rank]

    @cached_property
    def parts(self) -> Sequence[Any]:
        """Return each rank's state, read on access.

        Raises:
            CheckpointError: As for `state`.
        """
        return _Parts(self)

    def load_into(self, objects: Any) -> None:
        """Restore the saved state into `objects`.

        `objects` has the form of the saved state: an object with `load_state_dict`, or a dict. In a dict, objects with
        `load_state_dict` load their state, tensors are overwritten in place, and other values are replaced.

        Raises:
            UserError: The checkpoint lacks a key of the dict `objects`, or a value cannot be restored.
        """
        state = self.state
        if callable(getattr(objects, "load_state_dict", None)):
            objects.load_state_dict(state)
            return
        if not isinstance(objects, MutableMapping) or not isinstance(state, Mapping):
            raise UserError(
                f"a {type(objects).__name__} can't take the state of step {self.step}, a {type(state).__name__}. Give the dict "
                "that save() was given, or take the values from `.state`."
            )
        # Check that the checkpoint has an entry for each object before any object changes.
        if missing := [name for name in objects if name not in state]:
            raise UserError(
                f"the checkpoint of step {self.step} has no {missing[0]!r}; it has {', '.join(map(repr, state))}. Leave it out, "
                "or start in another folder."
            )
        for name, value in objects.items():
            saved = state[name]
            # Compare shapes first, because `copy_` would silently broadcast a smaller tensor.
            if is_tensor(value) and not (is_tensor(saved) and value.shape == saved.shape):
                raise UserError(
                    f"{name!r} is a tensor of shape {list(value.shape)}, and the checkpoint of step {self.step} has "
                    f"{_described(saved)} there. Give one of that shape, or take it from `.state`."
                )
        for name, value in objects.items():
            if callable(getattr(value, "load_state_dict", None)):
                value.load_state_dict(state[name])
            elif is_tensor(value):
                value.detach().copy_(state[name])
            else:
                objects[name] = state[name]


def _described(value: object) -> str:
    return f"one of shape {list(value.shape)}" if is_tensor(value) else f"a {type(value).__name__}"


class _Parts(Sequence[object]):
    def __init__(self, checkpoint: Checkpoint) -> None:
        # Keep the checkpoint: when Python deletes it, descriptors of states that exist only in memory are closed.
        self._checkpoint = checkpoint
        self._paths = checkpoint.paths

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> object: ...
    @overload
    def __getitem__(self, index: slice) -> list[object]: ...
    def __getitem__(self, index: int | slice) -> object:
        if isinstance(index, slice):
            return list(map(_state_in, self._paths[index]))
        return _state_in(self._paths[index])


def _state_in(path: Path) -> object:
    reader = files.CheckpointFile(path)
    try:
        return decode_state(reader.state, reader.array)
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(files.unreadable(path, str(error))) from error


def latest(folder: str | os.PathLike[str] | None = None) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None.

    Every rank must call this before training. Loading runs no code from the file. `folder`: see `save`.

    Raises:
        UserError: `folder` is a URL or a file.

    Examples:
        >>> from paceline import checkpoint
        >>> checkpoint.save({"weights": [1.0, 2.0]}, step=7, folder="checkpoints")
        True
        >>> checkpoint.latest("checkpoints").step
        7
    """
    # If this process is still writing a checkpoint, wait for the end: it is the newest checkpoint.
    _settled(END_S)
    place = files.folder_of(folder)
    complete = files.whole(files.parts_in(place))
    step = max(complete, default=-1)
    kept_step, fds = newest(place) or (-1, [])
    if kept_step > step:
        found = Checkpoint(kept_step, tuple(Path(f"/proc/self/fd/{fd}") for fd in fds))
        for fd in fds:
            weakref.finalize(found, os.close, fd)
        return found
    for fd in fds:
        os.close(fd)
    return Checkpoint(step, tuple(place / part.name for part in complete[step])) if complete else None
