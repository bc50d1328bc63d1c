"""The errors of a model spread over workers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from paceline.errors import CheckpointError, PacelineError, UserError

__all__ = ["CheckpointError", "ParallelError", "WorkerError", "by_value", "check_count", "error_summary", "named_ranks"]

_Value = TypeVar("_Value", bound=Hashable)


class ParallelError(UserError):
    """A model, strategy, batch or loss cannot be used as given."""


class WorkerError(PacelineError, RuntimeError):
    """Another rank has failed, so this rank cannot continue.

    Attributes:
        rank: The rank that failed first, or -1 if no rank could report its failure.
        cause_text: The traceback of that rank, or "".
    """

    def __init__(self, message: str, *, rank: int, cause_text: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause_text = cause_text


def check_count(setting: str, value: object, rule: str = "a whole number of at least 1", *, least: float = 1) -> None:
    """Raise ParallelError unless `value` is an integer of at least `least`.

    The message is "<setting>: <rule>."
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ParallelError(f"{setting}: {rule}.")


def error_summary(error: BaseException) -> str:
    """Return an error in one line, such as "ValueError: no rows"."""
    line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def by_value(values: Iterable[_Value]) -> dict[_Value, list[int]]:
    """Return value -> ranks that have it. `values` has one value per rank."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def named_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text: "rank 3", or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
