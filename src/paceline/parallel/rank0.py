"""Decisions that the first rank makes for all: two machines may measure, or round, a little differently. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import from_first
from paceline.parallel.mesh import WorldPlace


def decide(world: WorldPlace, find: Callable[[], Any], kinds: Sequence[type] = (), what: str = "") -> Any:
    """The result of `find` on rank 0. Called on all ranks, of which the others wait.

    kinds: the dataclasses that may be in it (see `exchange`). what: what the others are told to have failed where `find` raises
        anything else than a ParallelError, which rank 0 raises itself; "": they are left to hear of it as of any failure.

    Raises:
        ParallelError: on every rank, where `find` raised it.
    """
    found, failed, told = None, None, None
    if world.rank == 0:
        try:
            found = find()
        except Exception as error:
            is_known = isinstance(error, ParallelError)
            if not is_known and not what:
                raise
            # Raised only when the others have been told, for they wait for the answer.
            failed = error
            told = str(error) if is_known else f"{what} failed on rank 0: {type(error).__name__}: {error}"
    answer, reason = from_first((found, told), kinds)
    if failed is not None:
        raise failed
    if reason is not None:
        raise ParallelError(reason)
    return answer
