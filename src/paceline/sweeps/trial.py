"""The class Trial, with which samplers and policies work, and functions that rank trials."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from paceline.runs import states
from paceline.runs.record import duration_s
from paceline.sweeps.expressions import Raw

Goal: TypeAlias = Literal["maximize", "minimize"]

SHOWN_PAUSED = "Paused"


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One run of a trial. A trial that was paused and continued has several.

    Attributes:
        chosen, values, status: The run's point as raw values by key, its values by name, and its state.
        curve: Values that this run has logged itself.
        source: Id of the run whose checkpoints this run got. None for a trial's first run.
        why: The reason why the run was started, as a sentence.
    """

    run_id: str
    chosen: Mapping[str, Raw] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    status: str = states.NOT_STARTED
    curve: tuple[float, ...] = ()
    source: str | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Next:
    """The next run of a paused trial.

    Attributes:
        number: The trial's number.
        source: Id of the run from whose checkpoints the next run starts.
        chosen: The point of the next run, as a dict of keys to raw values.
        rung: Number of logged values until which the trial continues without another decision of the policy.
        why: The reason for the run, as a sentence.
    """

    number: int
    source: str
    chosen: Mapping[str, Raw]
    rung: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial of a sweep, with its run or runs.

    Attributes:
        number: The trial's number, from 0.
        run_id: Id of the trial's last run. `chosen`, `values`, `status`, `source` and `why` belong to this run too.
        chosen: The trial's point, as a dict of keys to raw values, the form for samplers.
        values: The values that the script got, by name.
        curve: Values of the primary metric in the order of logging, not necessarily finite. The values of all runs of
            the trial, and of all attempts of a run, form one series.
        further: The curves of the sweep's other metrics, like `curve`.
        notes: Data that the sampler has stored with the point.
        earlier: The runs before the last one.
        begin: Number of the curve's values that the earlier runs have logged.
        paused: The reason why the policy has paused the last run, or None.
        stopped: The reason why the trial will not continue, or None.
        rung: Number of logged values until which the last run continues without another decision of the policy.
        started_utc: Start of the trial's first process, or None.
        ended_utc: End of the trial's last process, or None.
    """

    number: int
    run_id: str
    chosen: Mapping[str, Raw] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    status: str = states.NOT_STARTED
    curve: tuple[float, ...] = ()
    started_utc: str | None = None
    ended_utc: str | None = None
    further: tuple[tuple[float, ...], ...] = ()
    notes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    earlier: tuple[Leg, ...] = ()
    begin: int = 0
    source: str | None = None
    why: str | None = None
    paused: str | None = None
    stopped: str | None = None
    rung: int = 0

    @property
    def duration_s(self) -> float | None:
        """Seconds from the trial's start to its end (or now); None before the start."""
        return duration_s(self.started_utc, self.ended_utc)

    @property
    def is_over(self) -> bool:
        return self.status in states.TERMINAL

    @property
    def is_paused(self) -> bool:
        """Whether the policy has paused the trial's last run."""
        # A paused run is Canceled. If the script ended by itself before the pause, the run has another state: the trial is over.
        return self.paused is not None and self.status == states.CANCELED

    @property
    def shown(self) -> str:
        """The status to display: Paused for a paused trial that may continue."""
        return SHOWN_PAUSED if self.is_paused and self.stopped is None else self.status

    @property
    def legs(self) -> tuple[Leg, ...]:
        """All runs of the trial in order, including the last."""
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

    def gone_on(self, run_id: str, following: Next, values: Mapping[str, object]) -> Trial:
        """Return the trial with run `following` added, with id `run_id` and hyperparameters `values`."""
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
        """Return the run with the best value, or the last run without values."""
        # Reverse the runs, since `min` returns the first of equal values, and the last run is preferred.
        return min(reversed(self.legs), key=lambda leg: cost(best(leg.curve, goal), goal))

    @property
    def curves(self) -> tuple[tuple[float, ...], ...]:
        """The values of each metric over time, the primary metric first."""
        return (self.curve, *self.further)

    @property
    def last(self) -> tuple[float, ...] | None:
        """The last values of all metrics; None unless all are finite.

        With several metrics, trials are ranked by last values, because the best values may come from different steps.
        """
        if not all(self.curves):
            return None
        values = tuple(curve[-1] for curve in self.curves)
        return values if all(map(math.isfinite, values)) else None

    def best(self, goal: Goal, interval: int | None = None) -> float | None:
        """Return the best finite value among the first `interval` values, or None."""
        so_far = self._maxima if goal == "maximize" else self._minima
        count = len(so_far) if interval is None else min(interval, len(so_far))
        if count < 1 or math.isnan(value := so_far[count - 1]):
            return None
        return value

    # Cache the maxima: policies read the best values of thousands of trials repeatedly, and most trials have ended.
    @cached_property
    def _maxima(self) -> array[float]:
        return array("d", itertools.accumulate(map(_finite, self.curve), _larger))

    @cached_property
    def _minima(self) -> array[float]:
        return array("d", itertools.accumulate(map(_finite, self.curve), _smaller))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _larger(one: float, other: float) -> float:
    # Comparisons with NaN are False, so a NaN value does not replace the best value.
    return other if other > one or math.isnan(one) else one


def _smaller(one: float, other: float) -> float:
    return other if other < one or math.isnan(one) else one


def best(values: Iterable[float], goal: Goal) -> float | None:
    """Return the best finite value for a goal, or None."""
    # Filter first, because the result of max() with a NaN depends on the order of the values.
    finite = filter(math.isfinite, values)
    return max(finite, default=None) if goal == "maximize" else min(finite, default=None)


def cost(value: float | None, goal: Goal) -> float:
    """Return a metric's value as a number that is smaller for a better value."""
    if value is None:
        return math.inf
    return -value if goal == "maximize" else value


def is_better(one: float, other: float, goal: Goal) -> bool:
    return cost(one, goal) < cost(other, goal)


def ranked(trials: Sequence[Trial], goal: Goal) -> list[Trial]:
    """Sort trials by best value, the best first, then by number."""
    return sorted(trials, key=lambda trial: (cost(trial.best(goal), goal), trial.number))


def front(trials: Sequence[Trial], goals: Sequence[Goal]) -> list[Trial]:
    """Return the trials on the Pareto front of last values, sorted by the first metric.

    A trial is on the front unless another trial is at least as good in each metric and better in one. A trial without a
    finite last value of each metric is not on the front.
    """
    known = [(tuple(map(cost, values, goals)), trial) for trial in trials if (values := _values(trial, goals))]
    on_front: list[tuple[tuple[float, ...], Trial]] = []
    # After this sort no trial is dominated by a later trial, so compare each trial only with the front.
    for key, trial in sorted(known, key=lambda one: (one[0], one[1].number)):
        if not any((other != key and all(a <= b for a, b in zip(other, key, strict=True))) for other, _ in on_front):
            on_front.append((key, trial))
    return [trial for _, trial in on_front]


def ordered(trials: Sequence[Trial], goals: Sequence[Goal]) -> list[Trial]:
    """Return the trials of a sweep, the best first.

    With several metrics, the Pareto front comes first. The other trials follow, sorted by the first metric.
    """
    if len(goals) == 1:
        return ranked(trials, goals[0])
    first = front(trials, goals)
    on_front = {trial.number for trial in first}

    def key(trial: Trial) -> tuple[float, int]:
        values = _values(trial, goals)
        return cost(values[0] if values else None, goals[0]), trial.number

    return first + sorted((trial for trial in trials if trial.number not in on_front), key=key)


def _values(trial: Trial, goals: Sequence[Goal]) -> tuple[float, ...]:
    # Return no values for a new trial, which has no curves yet.
    return trial.last if trial.last and len(trial.last) == len(goals) else ()
