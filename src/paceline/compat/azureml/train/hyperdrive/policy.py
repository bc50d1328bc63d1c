"""What stops a trial early (`azureml.train.hyperdrive.policy`): Paceline's policies, with the SDK's order of parameters."""

from __future__ import annotations

from typing import Any

from paceline.compat.azureml.exceptions import sdk_errors
from paceline.sweeps.policies.policy import Bandit, MedianStopping, TruncationSelection

__all__ = [
    "BanditPolicy",
    "EarlyTerminationPolicy",
    "MedianStoppingPolicy",
    "NoTerminationPolicy",
    "TruncationSelectionPolicy",
]


class EarlyTerminationPolicy:
    """`policy`: Paceline's own."""

    policy: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"


class NoTerminationPolicy(EarlyTerminationPolicy):
    """Each trial runs to its end."""


class BanditPolicy(EarlyTerminationPolicy):
    """Stops what is behind the best by more than the slack.

    Raises:
        HyperDriveConfigException: both slacks or none; intervals that can't be.
    """

    @sdk_errors
    def __init__(
        self,
        evaluation_interval: int = 1,
        slack_factor: float | None = None,
        slack_amount: float | None = None,
        delay_evaluation: int = 0,
    ) -> None:
        self.policy = Bandit(
            slack_factor=slack_factor,
            slack_amount=slack_amount,
            evaluation_interval=evaluation_interval,
            delay_evaluation=delay_evaluation,
        )


class MedianStoppingPolicy(EarlyTerminationPolicy):
    """Stops what is worse than the median of the running averages.

    Raises:
        HyperDriveConfigException: intervals that can't be.
    """

    @sdk_errors
    def __init__(self, evaluation_interval: int = 1, delay_evaluation: int = 0) -> None:
        self.policy = MedianStopping(evaluation_interval=evaluation_interval, delay_evaluation=delay_evaluation)


class TruncationSelectionPolicy(EarlyTerminationPolicy):
    """Stops the worst `truncation_percentage` of 100 at each interval.

    Raises:
        HyperDriveConfigException: a percentage that is no integer from 1 to 99; intervals that can't be.
    """

    @sdk_errors
    def __init__(
        self,
        truncation_percentage: int,
        evaluation_interval: int = 1,
        delay_evaluation: int = 0,
        exclude_finished_jobs: bool = False,
    ) -> None:
        self.policy = TruncationSelection(
            truncation_percentage=truncation_percentage,
            evaluation_interval=evaluation_interval,
            delay_evaluation=delay_evaluation,
        )
