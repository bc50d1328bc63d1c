"""Early termination policies (`azureml.train.hyperdrive.policy`).

They are Paceline's policies with the SDK's parameter order.
"""

from __future__ import annotations

from paceline import Bandit, MedianStopping, TruncationSelection
from paceline.compat.azureml.exceptions import sdk_errors
from paceline.sweeps import Policy

__all__ = [
    "BanditPolicy",
    "EarlyTerminationPolicy",
    "MedianStoppingPolicy",
    "NoTerminationPolicy",
    "TruncationSelectionPolicy",
]


class EarlyTerminationPolicy:
    """A policy; `policy` is Paceline's."""

    policy: Policy | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"


class NoTerminationPolicy(EarlyTerminationPolicy):
    """A policy that never stops a trial."""


class BanditPolicy(EarlyTerminationPolicy):
    """A policy that stops trials behind the best by more than the slack.

    Raises:
        HyperDriveConfigException: Both slacks or none are present, or an interval is not valid.
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
    """A policy that stops trials below the median of the running averages.

    Raises:
        HyperDriveConfigException: An interval is not valid.
    """

    @sdk_errors
    def __init__(self, evaluation_interval: int = 1, delay_evaluation: int = 0) -> None:
        self.policy = MedianStopping(evaluation_interval=evaluation_interval, delay_evaluation=delay_evaluation)


class TruncationSelectionPolicy(EarlyTerminationPolicy):
    """A policy that stops the worst trials at each interval.

    `truncation_percentage` is their percentage.

    Raises:
        HyperDriveConfigException: The percentage is not an integer from 1 to 99, or an interval is not valid.
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
