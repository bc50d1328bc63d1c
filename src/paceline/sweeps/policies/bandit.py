"""Bandit: stop what is too far behind the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import SweepError
from paceline.sweeps.expressions import is_number
from paceline.sweeps.policies.policy import check_intervals, judged
from paceline.sweeps.trial import Goal, Trial, is_better


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
