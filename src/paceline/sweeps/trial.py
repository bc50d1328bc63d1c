"""What samplers and policies know of a trial: its point, its state and its curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from paceline.runs import states
from paceline.runs.record import duration_s
from paceline.sweeps.expressions import Raw

Goal: TypeAlias = Literal["maximize", "minimize"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One child of a sweep.

    number: from 0. chosen: key -> raw value of its point. values: name -> value, as its script got them.
    curve: the primary metric's values in the order of their logging: one is one interval. values that are no finite numbers
        are in it as they came.
    started_utc, ended_utc: when its processes began and ended; None where they have not.
    """

    number: int
    run_id: str
    chosen: Mapping[str, Raw] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    status: str = states.NOT_STARTED
    curve: tuple[float, ...] = ()
    started_utc: str | None = None
    ended_utc: str | None = None

    @property
    def duration_s(self) -> float | None:
        """Seconds from the start to the end, or to now; None before the start."""
        return duration_s(self.started_utc, self.ended_utc)

    @property
    def is_over(self) -> bool:
        return self.status in states.TERMINAL

    def best(self, goal: Goal, interval: int | None = None) -> float | None:
        """The best finite value of the first `interval` ones (default: of all); None where there is none."""
        return best(self.curve[:interval], goal)


def best(values: Iterable[float], goal: Goal) -> float | None:
    """The largest, or smallest, of the finite values; None where there is none."""
    # A NaN compares as false with everything, so max() would depend on the order of the values.
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return max(finite) if goal == "maximize" else min(finite)


def is_better(one: float, other: float, goal: Goal) -> bool:
    return one > other if goal == "maximize" else one < other


def ranked(trials: Sequence[Trial], goal: Goal) -> list[Trial]:
    """The trials by their best values, the best first; those without one last, both in order of their numbers."""
    sign = -1 if goal == "maximize" else 1

    def key(trial: Trial) -> tuple[bool, float, int]:
        value = trial.best(goal)
        # False sorts before True: trials without a value come last, whatever the goal.
        return value is None, sign * value if value is not None else 0.0, trial.number

    return sorted(trials, key=key)
