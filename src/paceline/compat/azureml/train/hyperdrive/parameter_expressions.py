"""Search spaces (`azureml.train.hyperdrive.parameter_expressions`).

As in the SDK, the bounds of loguniform and qloguniform are logarithms, unlike those of `paceline.loguniform`.
"""

from __future__ import annotations

import math

import paceline
from paceline.compat.azureml.exceptions import HyperDriveConfigException, sdk_errors
from paceline.sweeps import Expression

__all__ = [
    "choice",
    "lognormal",
    "loguniform",
    "normal",
    "qlognormal",
    "qloguniform",
    "qnormal",
    "quniform",
    "randint",
    "uniform",
]


@sdk_errors
def choice(*options: object) -> Expression:
    """Choose an option.

    The options may also be a single list or range.
    """
    if len(options) == 1 and isinstance(options[0], (range, tuple)):
        options = (list(options[0]),)
    return paceline.choice(*options)


@sdk_errors
def randint(upper: int) -> Expression:
    """Choose an integer from 0 to `upper` - 1."""
    return paceline.randint(upper)


@sdk_errors
def uniform(min_value: float, max_value: float) -> Expression:
    """Choose a number from min_value to max_value."""
    return paceline.uniform(min_value, max_value)


@sdk_errors
def quniform(min_value: float, max_value: float, q: float) -> Expression:
    """Choose round(uniform(min_value, max_value) / q) * q."""
    return paceline.quniform(min_value, max_value, q)


@sdk_errors
def loguniform(min_value: float, max_value: float) -> Expression:
    """Choose exp(uniform(min_value, max_value))."""
    return paceline.loguniform(_exp(min_value), _exp(max_value))


@sdk_errors
def qloguniform(min_value: float, max_value: float, q: float) -> Expression:
    """Choose round(exp(uniform(min_value, max_value)) / q) * q."""
    return paceline.qloguniform(_exp(min_value), _exp(max_value), q)


# Their parameters have the SDK's names: mu, sigma and q.
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
