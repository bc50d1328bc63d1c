"""The errors of a model that is spread over workers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from paceline.errors import CheckpointError, PacelineError, UserError

__all__ = ["CheckpointError", "ParallelError", "WorkerError", "by_value", "named_ranks", "told"]

_Value = TypeVar("_Value", bound=Hashable)


class ParallelError(UserError):
    """A model, a strategy, a batch or a loss that can't be used as it is. Also a ValueError."""


class WorkerError(PacelineError, RuntimeError):
    """Another rank failed first, and this one can't go on without it.

    rank: the one that failed, or -1 where it could say nothing. cause_text: its traceback, or "".
    """

    def __init__(self, message: str, *, rank: int, cause_text: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause_text = cause_text


def told(error: BaseException) -> str:
    """Another library's error as a part of a sentence: its class and the first line of what it says."""
    line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def by_value(values: Iterable[_Value]) -> dict[_Value, list[int]]:
    """Each value -> the ranks that have it. values: of each rank, in their order."""
    found: dict[_Value, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def named_ranks(ranks: Sequence[int]) -> str:
    """Rank 3, or ranks 0, 2."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
