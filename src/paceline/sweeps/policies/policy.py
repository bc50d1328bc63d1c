"""What a policy is, and how all of them count.

An interval is one logging of the primary metric by the script. A policy judges a trial at intervals that are multiples of
evaluation_interval and at least delay_evaluation, as the Azure SDK's do. A trial is judged at the last such interval that it has
reached, each time that anything new is known: a better curve that comes later is held against those that run as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.errors import SweepError
from paceline.sweeps.expressions import is_number
from paceline.sweeps.trial import Goal, Trial, cost, is_better


@runtime_checkable
class Policy(Protocol):
    """Judges trials while they run."""

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Trial number -> why it is to be stopped, of those that run. trials: all of the sweep."""

    def to_json(self) -> dict[str, Any]:
        """`{"name": ..., parameter: ...}`."""


def judged_at(trial: Trial, evaluation_interval: int, delay_evaluation: int) -> int | None:
    """The interval at which a trial is judged now; None where it is not judged: it is over, or has not come so far."""
    # A trial that has logged nothing is not judged even with a delay of 0: there is nothing to judge.
    last = len(trial.curve) // evaluation_interval * evaluation_interval
    return last if not trial.is_over and last and last >= delay_evaluation else None


def judged(
    trials: Sequence[Trial], goal: Goal, evaluation_interval: int, delay_evaluation: int
) -> Iterator[tuple[Trial, int, float]]:
    """The trials that are judged now: each with its interval, and with its best value by then. One without any runs on."""
    for trial in trials:
        interval = judged_at(trial, evaluation_interval, delay_evaluation)
        if interval is not None and (own := trial.best(goal, interval)) is not None:
            yield trial, interval, own


def check_intervals(policy: str, evaluation_interval: int, delay_evaluation: int) -> None:
    """Raises:
    SweepError: a number of intervals that can't be.
    """
    check_whole(policy, "evaluation_interval", evaluation_interval, at_least=1)
    check_whole(policy, "delay_evaluation", delay_evaluation, at_least=0)


def check_whole(policy: str, name: str, value: object, *, at_least: int) -> None:
    """Raises:
    SweepError: the value is no integer, or is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise SweepError(f"{policy}: {name}={value!r} is no integer of {at_least} or more.")


@dataclass(frozen=True, kw_only=True)
class MedianStopping:
    """Stops a trial whose best value so far is worse than the median of the other trials' running averages up to that interval.

    evaluation_interval, delay_evaluation: see `policies.policy`. Trials that have not come to the interval are not counted.

    Raises:
        SweepError: intervals that can't be.
    """

    evaluation_interval: int = 1
    delay_evaluation: int = 0

    def __post_init__(self) -> None:
        check_intervals("MedianStopping", self.evaluation_interval, self.delay_evaluation)

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Trial number -> why it is to be stopped."""
        found: dict[int, str] = {}
        for trial, interval, own in judged(trials, goal, self.evaluation_interval, self.delay_evaluation):
            averages = [
                statistics.fmean(other.curve[:interval])
                for other in trials
                if other.number != trial.number and len(other.curve) >= interval
            ]
            averages = [average for average in averages if not math.isnan(average)]  # a NaN is no opinion
            if averages and is_better(median := statistics.median(averages), own, goal):
                found[trial.number] = (
                    f"MedianStopping: its best of {own:g} after {interval} values is worse than the median of the "
                    f"others' averages, {median:.4g}"
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """`{"name": ..., parameter: ...}`."""
        return {"name": "median", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class TruncationSelection:
    """Stops a trial that is among the worst truncation_percentage of all that came to its interval, by their best values so far.

    truncation_percentage: an integer from 1 to 99; the number of trials is rounded down.
    evaluation_interval, delay_evaluation: see `policies.policy`.

    Raises:
        SweepError: a percentage or intervals that can't be.
    """

    truncation_percentage: int
    evaluation_interval: int = 1
    delay_evaluation: int = 0

    def __post_init__(self) -> None:
        check_intervals("TruncationSelection", self.evaluation_interval, self.delay_evaluation)
        check_whole("TruncationSelection", "truncation_percentage", self.truncation_percentage, at_least=1)
        if self.truncation_percentage > 99:
            raise SweepError(f"TruncationSelection: truncation_percentage={self.truncation_percentage} is not 1 to 99.")

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Trial number -> why it is to be stopped."""
        found: dict[int, str] = {}
        for trial, interval, own in judged(trials, goal, self.evaluation_interval, self.delay_evaluation):
            bests = (other.best(goal, interval) for other in trials if len(other.curve) >= interval)
            worst = sorted((cost(value, goal) for value in bests if value is not None), reverse=True)
            count = len(worst) * self.truncation_percentage // 100
            # Of equal values none is worse than the other: those at the edge stay.
            if count and cost(own, goal) > worst[count]:
                found[trial.number] = (
                    f"TruncationSelection: its best of {own:g} after {interval} values is among the worst "
                    f"{self.truncation_percentage} % of {len(worst)} trials"
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """`{"name": ..., parameter: ...}`."""
        return {"name": "truncation", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Bandit:
    """Stops a trial whose best value so far is worse than the best of all trials at the same interval by more than the slack.

    slack_factor: as a ratio: with a best of 0.8 and 0.2, what is below 0.8 / 1.2 = 0.667 is stopped; where the metric is
        minimized, what is above 0.8 * 1.2. Below zero, where a ratio turns round, the two change places: the bound is always
        worse than the best.
    slack_amount: as a difference. Exactly one of the two is given; 0 counts as not given, as in the SDK.
    evaluation_interval, delay_evaluation: see `policies.policy`.

    Raises:
        SweepError: both slacks or none, a negative one, or intervals that can't be.
    """

    slack_factor: float | None = None
    slack_amount: float | None = None
    evaluation_interval: int = 1
    delay_evaluation: int = 0

    def __post_init__(self) -> None:
        check_intervals("Bandit", self.evaluation_interval, self.delay_evaluation)
        # bool() and not `is None`: the SDK's callers pass 0 for the slack that they don't want.
        if bool(self.slack_factor) == bool(self.slack_amount):
            raise SweepError(
                "Bandit: give slack_factor or slack_amount, one of them and above 0, such as slack_factor=0.1; given are "
                f"{self.slack_factor!r} and {self.slack_amount!r}."
            )
        slack = self.slack_factor or self.slack_amount
        if not is_number(slack) or slack <= 0:
            raise SweepError(f"Bandit: the slack {slack!r} is no number above 0.")

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Trial number -> why it is to be stopped."""
        found: dict[int, str] = {}
        leaders: dict[int, float] = {}
        for trial, interval, own in judged(trials, goal, self.evaluation_interval, self.delay_evaluation):
            # The best of trials that have fewer values counts too: what they have reached so far can only get better.
            if interval not in leaders:
                bests = [value for other in trials if (value := other.best(goal, interval)) is not None]
                leaders[interval] = max(bests) if goal == "maximize" else min(bests)
            leader = leaders[interval]
            bound = self._bound(leader, goal)
            if is_better(bound, own, goal):
                side = "below" if goal == "maximize" else "above"
                found[trial.number] = (
                    f"Bandit: its best of {own:g} after {interval} values is {side} {bound:.4g}, which the best of all, "
                    f"{leader:g}, leaves as slack"
                )
        return found

    def _bound(self, leader: float, goal: Goal) -> float:
        if self.slack_amount:
            return leader - self.slack_amount if goal == "maximize" else leader + self.slack_amount
        assert self.slack_factor
        # Worse is towards zero for a positive best that is maximized or a negative one that is minimized.
        down = (leader > 0) == (goal == "maximize")
        return leader / (1 + self.slack_factor) if down else leader * (1 + self.slack_factor)

    def to_json(self) -> dict[str, Any]:
        """`{"name": ..., parameter: ...}`."""
        return {"name": "bandit", **asdict(self)}
