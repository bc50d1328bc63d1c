"""Median stopping: stop what is worse than most others were on their way (Golovin et al., Google Vizier, KDD 2017, 3.2.1)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.sweeps.policies.policy import check_intervals, judged
from paceline.sweeps.trial import Goal, Trial, is_better


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
