"""Spaces, samplers and policies of sweeps (`azureml.train.hyperdrive.parameter_expressions`, `.sampling`, `.policy`).

As in the SDK, the bounds of loguniform and qloguniform are logarithms, unlike the bounds of `paceline.loguniform`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import paceline
from paceline import Bandit, MedianStopping, TruncationSelection
from paceline.compat.azureml.exceptions import HyperDriveConfigException, sdk_errors
from paceline.sweeps import Choice, Uniform

if TYPE_CHECKING:
    from paceline.sweeps import Expression, Policy

__all__ = [  # noqa: PLE0604 - the names are strings
    *("choice", "lognormal", "loguniform", "normal", "qlognormal", "qloguniform", "qnormal", "quniform", "randint"),
    *("uniform", "BayesianParameterSampling", "GridParameterSampling", "HyperParameterSampling"),
    *("RandomParameterSampling", "BanditPolicy", "EarlyTerminationPolicy", "MedianStoppingPolicy"),
    *("NoTerminationPolicy", "TruncationSelectionPolicy"),
]


@sdk_errors
def choice(*options: object) -> Expression:
    """Define a choice among options, which may be one list or range."""
    if len(options) == 1 and isinstance(options[0], (range, tuple)):
        options = (list(options[0]),)
    return paceline.choice(*options)


@sdk_errors
def randint(upper: int) -> Expression:
    """Define an integer from 0 to `upper` - 1."""
    return paceline.randint(upper)


@sdk_errors
def uniform(min_value: float, max_value: float) -> Expression:
    """Define a number from min_value to max_value, uniformly distributed."""
    return paceline.uniform(min_value, max_value)


@sdk_errors
def quniform(min_value: float, max_value: float, q: float) -> Expression:
    """Define the value round(uniform(min_value, max_value) / q) * q."""
    return paceline.quniform(min_value, max_value, q)


@sdk_errors
def loguniform(min_value: float, max_value: float) -> Expression:
    """Define the value exp(uniform(min_value, max_value))."""
    return paceline.loguniform(_exp(min_value), _exp(max_value))


@sdk_errors
def qloguniform(min_value: float, max_value: float, q: float) -> Expression:
    """Define the value round(exp(uniform(min_value, max_value)) / q) * q."""
    return paceline.qloguniform(_exp(min_value), _exp(max_value), q)


# These are Paceline's own functions. Their parameters mu, sigma and q have the same names as in the SDK.
normal = sdk_errors(paceline.normal)
qnormal = sdk_errors(paceline.qnormal)
lognormal = sdk_errors(paceline.lognormal)
qlognormal = sdk_errors(paceline.qlognormal)


def _exp(bound: float) -> float:
    try:
        return math.exp(bound)
    except (TypeError, OverflowError) as error:
        raise HyperDriveConfigException(
            f"the bound {bound!r} of loguniform: the SDK's are logarithms, such as loguniform(-6, -1) ({error})."
        ) from error


class HyperParameterSampling:
    """A sampler of hyperparameters.

    `parameter_space` maps parameter names, with or without leading dashes, to expressions such as `uniform(0, 1)`.

    Raises:
        HyperDriveConfigException: The space is empty, or the sampler does not support an expression.
    """

    sampler: ClassVar[str] = "random"
    _takes: ClassVar[tuple[type, ...]] = ()

    def __init__(self, parameter_space: dict[str, object], properties: dict[str, object] | None = None) -> None:
        if not isinstance(parameter_space, dict) or not parameter_space:
            raise HyperDriveConfigException("the parameter space must be a non-empty dict of name -> expression.")
        self.parameter_space = dict(parameter_space)
        self.properties = dict(properties or {})
        for name, expression in parameter_space.items():
            if self._takes and not isinstance(expression, self._takes):
                raise HyperDriveConfigException(
                    f"{type(self).__name__} takes {' and '.join(kind.__name__.lower() for kind in self._takes)} only; "
                    f"{name} is {expression!r}."
                )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.parameter_space!r})"


class RandomParameterSampling(HyperParameterSampling):
    """A sampler that chooses each point at random."""


class GridParameterSampling(HyperParameterSampling):
    """A sampler of all combinations of choices."""

    sampler = "grid"
    _takes = (Choice,)


class BayesianParameterSampling(HyperParameterSampling):
    """A sampler that learns from results by Optuna's TPE (extra `tune`)."""

    sampler = "tpe"
    _takes = (Choice, Uniform)


class EarlyTerminationPolicy:
    """The base of early termination policies. `policy` is the equivalent in Paceline."""

    policy: Policy | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"


class NoTerminationPolicy(EarlyTerminationPolicy):
    """A policy that never stops a trial."""


class BanditPolicy(EarlyTerminationPolicy):
    """A policy that stops trials worse than the best by more than the slack.

    Raises:
        HyperDriveConfigException: Both or neither of slack_factor and slack_amount are given, or an interval is wrong.
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
    """A policy that stops trials worse than the median of other trials.

    Raises:
        HyperDriveConfigException: An interval is not valid.
    """

    @sdk_errors
    def __init__(self, evaluation_interval: int = 1, delay_evaluation: int = 0) -> None:
        self.policy = MedianStopping(evaluation_interval=evaluation_interval, delay_evaluation=delay_evaluation)


class TruncationSelectionPolicy(EarlyTerminationPolicy):
    """A policy that stops the worst trials at each interval.

    `truncation_percentage` is the percentage of trials to stop.

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
