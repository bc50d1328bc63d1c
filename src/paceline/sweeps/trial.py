"""What samplers and policies know of a trial: its point, its state and its curve."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from paceline.runs import states
from paceline.runs.record import duration_s
from paceline.sweeps.expressions import Raw

Goal: TypeAlias = Literal["maximize", "minimize"]

SHOWN_PAUSED = "Paused"


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One run of a trial, of those that were paused and gone on from.

    chosen, values, status: as a trial's. curve: the values that this run has logged itself.
    source: run id of the one whose checkpoints it was given; None for a trial's first. why: it was started, in a sentence.
    """

    run_id: str
    chosen: Mapping[str, Raw] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    status: str = states.NOT_STARTED
    curve: tuple[float, ...] = ()
    source: str | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Next:
    """The next run of a paused trial.

    number: the trial's. source: run id of the one whose checkpoints it starts from. chosen: its point, key -> raw value.
    rung: it is not judged at so many values or fewer. why: a sentence.
    """

    number: int
    source: str
    chosen: Mapping[str, Raw]
    rung: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial of a sweep: a run, or several one after the other where its policy pauses and goes on with it.

    number: from 0. run_id: its only, or last, run; so are chosen, values, status, source and why.
    chosen: key -> raw value of its point. values: name -> value, as its script got them.
    curve: the primary metric's values in the order of their logging: one is one interval. values that are no finite numbers
        are in it as they came. Of several runs it is one series, as that of several attempts.
    further: the same of the further metrics, of a sweep with several. notes: what the sampler has written down with its point.
    earlier: the runs before the last, in order. begin: how many values of the curve come from them.
    paused: why its policy has paused the last run; None where it has not. stopped: why it was ended for good.
    rung: how many values its last run may go beyond without being judged again.
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
    further: tuple[tuple[float, ...], ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    earlier: tuple[Leg, ...] = ()
    begin: int = 0
    source: str | None = None
    why: str | None = None
    paused: str | None = None
    stopped: str | None = None
    rung: int = 0

    @property
    def duration_s(self) -> float | None:
        """Seconds from the start to the end, or to now; None before the start."""
        return duration_s(self.started_utc, self.ended_utc)

    @property
    def is_over(self) -> bool:
        return self.status in states.TERMINAL

    @property
    def is_paused(self) -> bool:
        """Whether its policy has ended its last run to go on with it later, maybe."""
        # A script that came to its own end while it was told to pause has nothing left to do.
        return self.paused is not None and self.status == states.CANCELED

    @property
    def shown(self) -> str:
        """Its state for people: Paused while it may go on. Its last run is Canceled all the while."""
        return SHOWN_PAUSED if self.is_paused and self.stopped is None else self.status

    @property
    def legs(self) -> tuple[Leg, ...]:
        """All its runs, the last one too."""
        last = Leg(
            run_id=self.run_id,
            chosen=self.chosen,
            values=self.values,
            status=self.status,
            curve=self.curve[self.begin :],
            source=self.source,
            why=self.why,
        )
        return (*self.earlier, last)

    def gone_on(self, run_id: str, following: Next, values: Mapping[str, Any]) -> Trial:
        """The trial with one more run, which has these values."""
        return replace(
            self,
            run_id=run_id,
            chosen=following.chosen,
            values=values,
            status=states.NOT_STARTED,
            ended_utc=None,
            earlier=self.legs,
            begin=len(self.curve),
            source=following.source,
            why=following.why,
            paused=None,
            stopped=None,
            rung=following.rung,
        )

    def best_leg(self, goal: Goal) -> Leg:
        """The run that has logged the best value; of equal ones, and of none, the last."""
        # `min` takes the first of equal ones.
        return min(reversed(self.legs), key=lambda leg: cost(best(leg.curve, goal), goal))

    @property
    def curves(self) -> tuple[tuple[float, ...], ...]:
        """One for each metric."""
        return (self.curve, *self.further)

    @property
    def last(self) -> tuple[float, ...] | None:
        """The last value of each metric; None where one has none, or no finite one.

        With several metrics a trial counts by these: the best of each may come from moments at which no model had both.
        """
        if not all(self.curves):
            return None
        found = tuple(curve[-1] for curve in self.curves)
        return found if all(map(math.isfinite, found)) else None

    def best(self, goal: Goal, interval: int | None = None) -> float | None:
        """The best finite value of the first `interval` ones (default: of all); None where there is none."""
        so_far = self._maxima if goal == "maximize" else self._minima
        count = len(so_far) if interval is None else min(interval, len(so_far))
        if count < 1 or math.isnan(value := so_far[count - 1]):
            return None
        return value

    # Policies ask again and again for the best at each interval of each of thousands of trials, most of which have ended.
    @cached_property
    def _maxima(self) -> array[float]:
        return array("d", itertools.accumulate(map(_finite, self.curve), _larger))

    @cached_property
    def _minima(self) -> array[float]:
        return array("d", itertools.accumulate(map(_finite, self.curve), _smaller))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _larger(one: float, other: float) -> float:
    # A NaN compares as false with everything: what is not finite leaves the best as it was.
    return other if other > one or math.isnan(one) else one


def _smaller(one: float, other: float) -> float:
    return other if other < one or math.isnan(one) else one


def best(values: Iterable[float], goal: Goal) -> float | None:
    """The largest, or smallest, of the finite values; None where there is none."""
    # A NaN compares as false with everything, so max() would depend on the order of the values.
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return max(finite) if goal == "maximize" else min(finite)


def cost(value: float | None, goal: Goal) -> float:
    """The value as a number of which less is better; of None more than of any value."""
    if value is None:
        return math.inf
    return -value if goal == "maximize" else value


def is_better(one: float, other: float, goal: Goal) -> bool:
    return cost(one, goal) < cost(other, goal)


def ranked(trials: Sequence[Trial], goal: Goal) -> list[Trial]:
    """The trials by their best values, the best first; those without one last, both in order of their numbers."""
    return sorted(trials, key=lambda trial: (cost(trial.best(goal), goal), trial.number))


def front(trials: Sequence[Trial], goals: Sequence[Goal]) -> list[Trial]:
    """The Pareto front, the best by the first metric first: those that no other trial beats or equals in each metric and beats in
    one. A trial counts by its last values (`Trial.last`); one without them is on no front.
    """
    known = [(tuple(map(cost, values, goals)), trial) for trial in trials if (values := _values(trial, goals))]
    found: list[tuple[tuple[float, ...], Trial]] = []
    # In this order nothing is beaten by what comes after it, so that each is held against the front alone.
    for key, trial in sorted(known, key=lambda one: (one[0], one[1].number)):
        if not any(_beats(other, key) for other, _ in found):
            found.append((key, trial))
    return [trial for _, trial in found]


def ordered(trials: Sequence[Trial], goals: Sequence[Goal]) -> list[Trial]:
    """The trials, the best first: by its best values; with several metrics the front, then the others by the first."""
    if len(goals) == 1:
        return ranked(trials, goals[0])
    first = front(trials, goals)
    on_front = {trial.number for trial in first}

    def key(trial: Trial) -> tuple[float, int]:
        values = _values(trial, goals)
        return cost(values[0] if values else None, goals[0]), trial.number

    return first + sorted((trial for trial in trials if trial.number not in on_front), key=key)


def _values(trial: Trial, goals: Sequence[Goal]) -> tuple[float, ...]:
    # One that has just begun has no curves yet.
    return trial.last if trial.last and len(trial.last) == len(goals) else ()


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
