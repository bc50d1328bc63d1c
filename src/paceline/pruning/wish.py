"""The criteria of what shall be removed, as they were given."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UserError
from paceline.runs import states
from paceline.system.names import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Which runs, snapshots, environments and cached files are wanted no longer. Something goes if every criterion that is
    given, and is for its kind, lets it.

    older_than_s: runs that ended, and environments and files that were last used, so many seconds ago.
    keep_last: of runs, all but the newest so many of each experiment.
    max_bytes: of each kind the oldest, or least recently used, until what is left is no more than that.
    status, experiment: of runs, those alone.

    Raises:
        UserError: a value below zero, or no such state.
    """

    older_than_s: float | None = None
    keep_last: int | None = None
    max_bytes: int | None = None
    status: str | None = None
    experiment: str | None = None

    def __post_init__(self) -> None:
        for name in ("older_than_s", "keep_last", "max_bytes"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UserError(f"{name}={value}: it can't be below 0.")
        if self.status is not None and self.status not in states.ALL:
            raise UserError(
                f"status={self.status!r} is no state.{did_you_mean(self.status, states.ALL)} There are {', '.join(states.ALL)}."
            )

    @property
    def is_for_runs(self) -> bool:
        """True where a criterion is given; without one, no run is unwanted."""
        return self.is_for_all or any(value is not None for value in (self.keep_last, self.status, self.experiment))

    @property
    def is_for_all(self) -> bool:
        """True where a criterion is given that environments and cached files have as well."""
        return self.older_than_s is not None or self.max_bytes is not None
