"""Truncation selection: at each interval, stop the worst so many per cent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import SweepError
from paceline.sweeps.policies.policy import check_intervals, check_whole, judged
from paceline.sweeps.trial import Goal, Trial, cost


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
