"""The protocol of stopping policies, and the policies by median, truncation and bandit.

An interval is one logged value of the primary metric. As in the Azure SDK, a policy judges a trial when the number of
its values is a multiple of evaluation_interval and at least delay_evaluation. When any trial logs new values, the
policy judges every live trial again, because other trials may have improved.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Protocol, runtime_checkable

from paceline.errors import SweepError
from paceline.sweeps.expressions import is_number
from paceline.sweeps.trial import Goal, Trial, cost, is_better


@runtime_checkable
class Policy(Protocol):
    """A rule that decides which live trials of a sweep to stop early."""

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Return {trial number: reason} for live trials that must stop."""

    def to_json(self) -> dict[str, object]:
        """Return the policy as `{"name": ..., parameter: ...}`."""


@dataclass(frozen=True, kw_only=True)
class NamedPolicy:
    """A policy that is stored in JSON as its name and its parameters."""

    NAME: ClassVar[str]

    def to_json(self) -> dict[str, object]:
        """Return the policy as `{"name": ..., parameter: ...}`."""
        return {"name": self.NAME, **asdict(self)}


def judged_at(trial: Trial, evaluation_interval: int, delay_evaluation: int) -> int | None:
    """Return the number of values at which to judge a live trial, or None."""
    # The curve has one entry per value, so a trial without a value is not judged, even with a delay of 0.
    last = len(trial.curve) // evaluation_interval * evaluation_interval
    return last if not trial.is_over and last and last >= delay_evaluation else None


def judged(
    trials: Sequence[Trial], goal: Goal, evaluation_interval: int, delay_evaluation: int
) -> Iterator[tuple[Trial, int, float]]:
    """Yield each trial to judge now, how many of its values count, and their best."""
    for trial in trials:
        interval = judged_at(trial, evaluation_interval, delay_evaluation)
        if interval is not None and (own := trial.best(goal, interval)) is not None:
            yield trial, interval, own


def check_intervals(policy: str, evaluation_interval: int, delay_evaluation: int) -> None:
    """Raise SweepError unless evaluation_interval >= 1 and delay_evaluation >= 0."""
    check_whole(policy, "evaluation_interval", evaluation_interval, at_least=1)
    check_whole(policy, "delay_evaluation", delay_evaluation, at_least=0)


def check_whole(policy: str, name: str, value: object, *, at_least: int) -> None:
    """Raise SweepError unless the value is an integer of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise SweepError(f"{policy}: {name}={value!r} is not an integer of {at_least} or more.")


@dataclass(frozen=True, kw_only=True)
class MedianStopping(NamedPolicy):
    """A policy that stops trials worse than the median of the other trials.

    A trial stops when its best value is worse than the median of the other trials' averages up to the same interval.
    Trials with fewer values do not count. (Golovin et al., Google Vizier, KDD 2017, 3.2.1.)

    Args:
        evaluation_interval: Each trial is judged whenever it has logged this many more values.
        delay_evaluation: No trial is judged before it has logged this many values.

    Raises:
        SweepError: An interval is out of range.

    Examples:
        >>> script = pl.Estimator(entry_script="train.py")
        >>> sweep = pl.Sweep(script, {"--lr": pl.uniform(0, 1)}, metric="loss", stop=pl.MedianStopping(delay_evaluation=5))
    """

    NAME: ClassVar[str] = "median"

    evaluation_interval: int = 1
    delay_evaluation: int = 0

    def __post_init__(self) -> None:
        check_intervals("MedianStopping", self.evaluation_interval, self.delay_evaluation)

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Return {trial number: reason} for live trials that must stop."""
        reasons: dict[int, str] = {}
        for trial, interval, own in judged(trials, goal, self.evaluation_interval, self.delay_evaluation):
            averages = [
                sum(other.curve[:interval]) / interval  # unlike `fmean`, `sum` permits infinite sums
                for other in trials
                if other.number != trial.number and len(other.curve) >= interval
            ]
            averages = [average for average in averages if not math.isnan(average)]  # NaN can't be sorted
            if averages and is_better(median := statistics.median(averages), own, goal):
                reasons[trial.number] = (
                    f"MedianStopping: its best of {own:g} after {interval} values is worse than the median of the "
                    f"others' averages, {median:.4g}"
                )
        return reasons


@dataclass(frozen=True, kw_only=True)
class TruncationSelection(NamedPolicy):
    """A policy that stops the worst trials at each evaluation.

    Args:
        truncation_percentage: Percentage of the trials to stop, from 1 to 99. The number to stop is rounded down.
        evaluation_interval: Each trial is judged whenever it has logged this many more values.
        delay_evaluation: No trial is judged before it has logged this many values.

    Raises:
        SweepError: The percentage or an interval is out of range.

    Examples:
        >>> stop = pl.TruncationSelection(truncation_percentage=25, evaluation_interval=2)
        >>> sweep = pl.Sweep(pl.Estimator(entry_script="train.py"), {"--lr": pl.uniform(0, 1)}, metric="loss", stop=stop)
    """

    NAME: ClassVar[str] = "truncation"

    truncation_percentage: int
    evaluation_interval: int = 1
    delay_evaluation: int = 0

    def __post_init__(self) -> None:
        check_intervals("TruncationSelection", self.evaluation_interval, self.delay_evaluation)
        check_whole("TruncationSelection", "truncation_percentage", self.truncation_percentage, at_least=1)
        if self.truncation_percentage > 99:
            raise SweepError(f"TruncationSelection: truncation_percentage={self.truncation_percentage} is not 1 to 99.")

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Return {trial number: reason} for live trials that must stop."""
        reasons: dict[int, str] = {}
        for trial, interval, own in judged(trials, goal, self.evaluation_interval, self.delay_evaluation):
            bests = (other.best(goal, interval) for other in trials if len(other.curve) >= interval)
            worst = sorted((cost(value, goal) for value in bests if value is not None), reverse=True)
            count = len(worst) * self.truncation_percentage // 100
            # `worst[count]` is the worst value with which a trial continues. Trials with an equal value continue, too.
            if count and cost(own, goal) > worst[count]:
                reasons[trial.number] = (
                    f"TruncationSelection: its best of {own:g} after {interval} values is among the worst "
                    f"{self.truncation_percentage} % of {len(worst)} trials"
                )
        return reasons


@dataclass(frozen=True, kw_only=True)
class Bandit(NamedPolicy):
    """A policy that stops trials far behind the best.

    Args:
        slack_factor: Slack as a ratio. With 0.2 and a best value of 0.8, trials below 0.8 / 1.2 = 0.667 stop; if the
            metric is minimized, trials above 0.8 * 1.2 stop. For a negative best value, the formulas are exchanged, so
            that the bound is worse.
        slack_amount: Slack as a difference. Give exactly one kind of slack; 0 counts as not given, as in the Azure SDK.
        evaluation_interval: Each trial is judged whenever it has logged this many more values.
        delay_evaluation: No trial is judged before it has logged this many values.

    Raises:
        SweepError: Not exactly one slack is given, it is negative, or an interval is out of range.

    Examples:
        >>> script = pl.Estimator(entry_script="train.py")
        >>> sweep = pl.Sweep(script, {"--lr": pl.uniform(0, 1)}, metric="loss", stop=pl.Bandit(slack_factor=0.2))
    """

    NAME: ClassVar[str] = "bandit"

    slack_factor: float | None = None
    slack_amount: float | None = None
    evaluation_interval: int = 1
    delay_evaluation: int = 0

    def __post_init__(self) -> None:
        check_intervals("Bandit", self.evaluation_interval, self.delay_evaluation)
        # Treat 0 like None, because callers of the Azure SDK pass 0 for the slack that they do not use.
        if bool(self.slack_factor) == bool(self.slack_amount):
            raise SweepError(
                "Bandit: give slack_factor or slack_amount, one of them and above 0, such as slack_factor=0.1; given are "
                f"{self.slack_factor!r} and {self.slack_amount!r}."
            )
        slack = self.slack_factor or self.slack_amount
        if not is_number(slack) or slack <= 0:
            raise SweepError(f"Bandit: the slack {slack!r} is not a number above 0.")

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Return {trial number: reason} for live trials that must stop."""
        reasons: dict[int, str] = {}
        leaders: dict[int, float] = {}
        for trial, interval, own in judged(trials, goal, self.evaluation_interval, self.delay_evaluation):
            # Count trials with fewer than `interval` values, too: further values could only improve their best value.
            if interval not in leaders:
                bests = [value for other in trials if (value := other.best(goal, interval)) is not None]
                leaders[interval] = max(bests) if goal == "maximize" else min(bests)
            leader = leaders[interval]
            bound = self._bound(leader, goal)
            if is_better(bound, own, goal):
                side = "below" if goal == "maximize" else "above"
                reasons[trial.number] = (
                    f"Bandit: its best of {own:g} after {interval} values is {side} {bound:.4g}, which the best of all, "
                    f"{leader:g}, leaves as slack"
                )
        return reasons

    def _bound(self, leader: float, goal: Goal) -> float:
        if self.slack_amount:
            return leader - self.slack_amount if goal == "maximize" else leader + self.slack_amount
        assert self.slack_factor
        # Divide if worse values than `leader` are nearer to zero: if it is positive and maximized, or negative and minimized.
        down = (leader > 0) == (goal == "maximize")
        return leader / (1 + self.slack_factor) if down else leader * (1 + self.slack_factor)
