"""Handles: the integers by which a script asks after what it has submitted."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.collectives.background_loop import waiting_at_once
from paceline.collectives.errors import CollectivesError
from paceline.compat.horovod.common.exceptions import HorovodInternalError, translated
from paceline.compat.horovod.common.process_sets import ProcessSet, checked_members, registry

if TYPE_CHECKING:
    from paceline.collectives import Engine, Handle


__all__ = ["clear", "poll", "submit", "synchronize", "translated", "waiting_at_once"]


#: What was submitted: process set and name, the engine's handle, and what makes the script's result of the engine's, and
#: keeps alive what the engine reads and writes.
_pending: dict[int, tuple[tuple[int, str], Handle, Callable[[Any], Any]]] = {}
_in_flight: dict[tuple[int, str], Handle] = {}
_numbers = itertools.count(1)
#: Process set, kind, and how often the world has joined -> numbers for what has no name.
_unnamed: defaultdict[tuple[int, str, int], Iterator[int]] = defaultdict(itertools.count)


def submit(
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    start: Callable[[Engine, str], Handle],
    finish: Callable[[Any], Any],
) -> int:
    """The handle of what `start(engine, full name)` submits; `finish` makes the script's result of the engine's.

    kind: "allreduce", ...; names of different kinds never meet.
    name: without one the n-th of its kind in this process set meets the n-th of the other ranks. In the world they are
        counted from 0 again after each join: while some ranks have joined, the others may do more of them.

    Raises:
        ValueError: not initialised, not a member of the process set, or the name is in flight already.
        HorovodInternalError: the engine can't take anything any more.
    """
    checked_members(process_set)
    number = process_set.process_set_id
    assert number is not None
    full = f"{kind}.{name}" if name is not None else f"{kind}.noname.{_next_unnamed(kind, number)}"
    key = (number, full)
    # Asked before the engine is, for the text that scripts know of Horovod's ValueError.
    before = _in_flight.get(key)
    if before is not None and not before.done():
        raise ValueError(
            f"Requested to {kind} a tensor with the same name as another tensor that is currently being processed: "
            f"{name!r}. Give each tensor a name of its own, or synchronize the first before the second."
        )
    try:
        handle = start(registry.engine(), full)
    except CollectivesError as error:
        raise HorovodInternalError(str(error)) from error
    # `itertools.count` and dictionaries are changed in one step each, so threads that submit need no lock. If two
    # submit the same name at once, the engine refuses the second.
    made = next(_numbers)
    _in_flight[key] = handle
    _pending[made] = (key, handle, finish)
    return made


def _next_unnamed(kind: str, process_set: int) -> str:
    engine = registry.engine()
    series = engine.joins if process_set == 0 else 0
    return engine.counted(process_set, next(_unnamed[process_set, kind, series]))


def poll(handle: int) -> bool:
    """True if `synchronize(handle)` would return at once.

    Raises:
        ValueError: there is no such handle, or it was synchronized.
    """
    pending = _pending.get(handle)
    if pending is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return pending[1].done()


def synchronize(handle: int) -> Any:
    """The result of what was submitted, once it is there; None for an unknown handle or one that was synchronized.

    Raises:
        HorovodInternalError: the ranks disagree on it, or one of them is gone; on every rank.
    """
    # Taken out at once: of two threads that ask for the same handle, one is given the result, the other None.
    pending = _pending.pop(handle, None)
    if pending is None:
        return None
    key, submitted, finish = pending
    try:
        result = submitted.wait()
    except CollectivesError as error:
        raise HorovodInternalError(str(error)) from error
    finally:
        # Another thread may have submitted the next of this name, as soon as this one was done.
        if _in_flight.get(key) is submitted:
            del _in_flight[key]
    return finish(result)


def clear() -> None:
    """Forget everything: the engine is gone, and the next one numbers unnamed tensors from 0."""
    _pending.clear()
    _in_flight.clear()
    _unnamed.clear()
