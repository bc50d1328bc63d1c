"""Handles: the integers that stand for submitted operations, and collectives of NumPy arrays."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.collectives.background_loop import waiting_at_once
from paceline.collectives.errors import CollectivesError
from paceline.collectives.handle import Handle
from paceline.collectives.numbers import Array
from paceline.compat.horovod.common.exceptions import HorovodInternalError, translated
from paceline.compat.horovod.common.process_sets import ProcessSet, checked_members, global_process_set, registry

__all__ = ["clear", "poll", "submit", "submit_several", "synchronize", "translated", "waiting_at_once"]


#: Operations in flight: (process set, name), the engine's handle, and a function that converts the engine's result to the
#: script's. The function also keeps alive the arrays that the engine reads and writes.
_pending: dict[int, tuple[tuple[int, str], Handle, Callable[[Any], Any]]] = {}
_in_flight: dict[tuple[int, str], Handle] = {}
_numbers = itertools.count(1)
#: (process set, kind of operation, number of `join` calls so far) -> counter that numbers operations without a name.
_unnamed: defaultdict[tuple[int, str, int], Iterator[int]] = defaultdict(itertools.count)


def submit(
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[Any], Any],
    arrays: object,
    how: Mapping[str, object],
    method: str | None = None,
) -> int:
    """Submit an operation to the engine and return its handle.

    The engine matches operations of the same kind and name across ranks. Operations without a name get a number,
    counted for each kind and process set, and are matched by this number. In the set of all ranks the numbers restart
    at 0 after each join, because ranks that have joined submit fewer operations.

    `method` names the engine's method, by default `kind`. `arrays` is an array or a list of arrays. `how` has further
    arguments of the method. `finish` converts the engine's result to the result that the script gets.
    """
    checked_members(process_set)
    number = process_set.process_set_id
    assert number is not None
    full = f"{kind}.{name}" if name is not None else f"{kind}.noname.{_next_unnamed(kind, number)}"
    key = (number, full)
    # Refuse a name that is in use before the engine does, because scripts expect a ValueError with Horovod's text.
    before = _in_flight.get(key)
    if before is not None and not before.done():
        raise ValueError(
            f"Requested to {kind} a tensor with the same name as another tensor that is currently being processed: "
            f"{name!r}. Give each tensor a name of its own, or synchronize the first before the second."
        )
    try:
        handle = getattr(registry.engine(), method or kind)(full, arrays, process_set=number, **how)
    except CollectivesError as error:
        raise HorovodInternalError(str(error)) from error
    # Threads need no lock here: `itertools.count` and dictionaries change atomically. If two threads submit the same name at the
    # same time, the engine refuses the second operation.
    made = next(_numbers)
    _in_flight[key] = handle
    _pending[made] = (key, handle, finish)
    return made


def submit_several(
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[list[Any]], Any],
    arrays: Sequence[Array],
    how: Mapping[str, object],
    *,
    grouped: bool,
) -> int:
    """Submit a collective on one array, or on several if `grouped`. Return its handle.

    `finish` always gets a list of results.
    """
    if grouped:
        return submit(f"grouped_{kind}", name, process_set, finish, arrays, how)
    [array] = arrays
    return submit(kind, name, process_set, lambda result: finish([result]), array, how)


def _next_unnamed(kind: str, process_set: int) -> str:
    engine = registry.engine()
    series = engine.joins if process_set == 0 else 0
    return engine.counted(process_set, next(_unnamed[process_set, kind, series]))


def poll(handle: int) -> bool:
    """Return whether `synchronize(handle)` would return immediately.

    Raises:
        ValueError: The handle is unknown, or was synchronized.
    """
    pending = _pending.get(handle)
    if pending is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return pending[1].done()


def synchronize(handle: int) -> Any:
    """Wait for the operation and return its result, or None for an unknown handle.

    Raises:
        HorovodInternalError: The ranks disagree, or a rank has died. Every rank raises this error.
    """
    # Remove the handle at once. If two threads wait for the same handle, one thread gets the result, and the other gets None.
    pending = _pending.pop(handle, None)
    if pending is None:
        return None
    key, submitted, finish = pending
    try:
        result = submitted.wait()
    except CollectivesError as error:
        raise HorovodInternalError(str(error)) from error
    finally:
        # Another thread may have submitted a new operation with this name. Then keep the new operation's entry.
        if _in_flight.get(key) is submitted:
            del _in_flight[key]
    return finish(result)


def clear() -> None:
    """Forget all handles and restart the counters of unnamed operations at 0."""
    _pending.clear()
    _in_flight.clear()
    _unnamed.clear()


def plain(array: Array) -> Array:
    """Return the array, or its bits if NumPy lacks its type (bfloat16)."""
    # `isbuiltin` is 1 for NumPy's types and 2 for those of ml_dtypes. The engine does not support the latter: return their bits.
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def as_type(array: Array, like: Array) -> Array:
    """Convert an array that `plain` returned to the dtype of `like`."""
    return array if array.dtype == like.dtype else array.view(like.dtype)


def broadcast_async_(
    array: Array, root_rank: int, name: str | None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast into `array`, and return its handle."""
    return submit("broadcast", name, process_set, lambda _: array, array, {"root": root_rank, "out": array})


def allgather_async(array: Array, name: str | None, process_set: ProcessSet = global_process_set) -> int:
    """Start an all-gather, and return its handle."""
    return submit("allgather", name, process_set, lambda result: result, array, {})


def allreduce_async(array: Array, op: str, name: str | None, process_set: ProcessSet = global_process_set) -> int:
    """Start an all-reduce into a new array; return its handle."""
    return submit("allreduce", name, process_set, lambda result: result, array, {"op": op})
