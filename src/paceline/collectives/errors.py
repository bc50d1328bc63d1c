"""The errors of collective operations."""

from __future__ import annotations

from paceline.errors import PacelineError, UserError


class CollectivesError(PacelineError, RuntimeError):
    """A collective operation can't be done, or there is no transport to do it with."""


class MismatchError(CollectivesError):
    """The ranks asked for different things under one name. Raised on every rank; the engine goes on."""


class ShutDownError(CollectivesError):
    """A rank has died, or has shut its engine down, while others still needed it. No further operation is possible."""


class LostRankError(ShutDownError):
    """A rank's process is gone, for certain. lost_rank: its rank in the world."""

    def __init__(self, message: str, lost_rank: int = -1) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


class ArgumentError(UserError):
    """An operation was asked for in a way that can't be right on any rank; nothing was submitted. Also a ValueError."""
