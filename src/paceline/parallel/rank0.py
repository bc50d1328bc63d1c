"""Decisions that the first rank makes for all: two machines may measure, or round, a little differently. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import from_first
from paceline.parallel.mesh import World


def decide(world: World, find: Callable[[], Any], kinds: Sequence[type] = ()) -> Any:
    """The result of `find` on rank 0. Called on all ranks, of which the others wait.

    kinds: the dataclasses that may be in it (see `exchange`).

    Raises:
        ParallelError: on every rank, where `find` raised it.
    """
    found, failed = None, None
    if world.rank == 0:
        try:
            found = find()
        except ParallelError as error:
            failed = error
    answer, reason = from_first((found, None if failed is None else str(failed)), kinds)
    if failed is not None:
        raise failed
    if reason is not None:
        raise ParallelError(reason)
    return answer
