"""The errors of a model that is spread over workers."""

from __future__ import annotations

from paceline.errors import CheckpointError, PacelineError, UserError

__all__ = ["CheckpointError", "ParallelError", "WorkerError", "told"]


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
