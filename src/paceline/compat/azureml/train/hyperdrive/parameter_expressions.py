"""The SDK's expressions (`azureml.train.hyperdrive.parameter_expressions`).

As there, the bounds of loguniform and qloguniform are logarithms, unlike those of `paceline.loguniform`.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.compat.azureml.exceptions import HyperDriveConfigException, sdk_errors
from paceline.sweeps import expressions

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
def choice(*options: Any) -> Any:
    """One of the options, which may be given as one list or range."""
    if len(options) == 1 and isinstance(options[0], (range, tuple)):
        options = (list(options[0]),)
    return expressions.choice(*options)


@sdk_errors
def randint(upper: int) -> Any:
    """An integer from 0 up to, and without, `upper`."""
    return expressions.randint(upper)


@sdk_errors
def uniform(min_value: float, max_value: float) -> Any:
    """A number between the two."""
    return expressions.uniform(min_value, max_value)


@sdk_errors
def quniform(min_value: float, max_value: float, q: float) -> Any:
    """round(uniform(min_value, max_value) / q) * q."""
    return expressions.quniform(min_value, max_value, q)


@sdk_errors
def loguniform(min_value: float, max_value: float) -> Any:
    """exp(uniform(min_value, max_value))."""
    return expressions.loguniform(_exp(min_value), _exp(max_value))


@sdk_errors
def qloguniform(min_value: float, max_value: float, q: float) -> Any:
    """round(exp(uniform(min_value, max_value)) / q) * q."""
    return expressions.qloguniform(_exp(min_value), _exp(max_value), q)


# Their parameters are called as the SDK's are: mu, sigma and q.
normal = sdk_errors(expressions.normal)
qnormal = sdk_errors(expressions.qnormal)
lognormal = sdk_errors(expressions.lognormal)
qlognormal = sdk_errors(expressions.qlognormal)


def _exp(bound: Any) -> float:
    try:
        return math.exp(bound)
    except (TypeError, OverflowError) as error:
        raise HyperDriveConfigException(
            f"the bound {bound!r} of loguniform: the SDK's are logarithms, such as loguniform(-6, -1) ({error})."
        ) from error
