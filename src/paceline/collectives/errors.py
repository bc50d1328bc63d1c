"""Errors of collective operations."""

from __future__ import annotations

from paceline.errors import PacelineError, UserError


class CollectivesError(PacelineError, RuntimeError):
    """A collective operation cannot be done, or there is no transport."""


class MismatchError(CollectivesError):
    """The ranks requested different operations under one name.

    Every rank raises this error, and the engine continues.
    """


class ShutDownError(CollectivesError):
    """A rank died or shut down while other ranks needed it. All further operations fail."""


class LostRankError(ShutDownError):
    """The process of world rank `lost_rank` has certainly ended."""

    def __init__(self, message: str, lost_rank: int = -1) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


class ArgumentError(UserError):
    """An argument is invalid, and nothing was submitted. Also a ValueError."""
