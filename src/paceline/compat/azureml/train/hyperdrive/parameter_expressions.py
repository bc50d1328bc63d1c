"""The SDK's expressions (`azureml.train.hyperdrive.parameter_expressions`).

As there, the bounds of loguniform and qloguniform are logarithms, unlike those of `paceline.loguniform`.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.sweeps import expressions
from paceline.sweeps.expressions import lognormal, normal, qlognormal, qnormal, quniform, uniform

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


def choice(*options: Any) -> Any:
    """One of the options, which may be given as one list or range."""
    if len(options) == 1 and isinstance(options[0], (range, tuple)):
        options = (list(options[0]),)
    return expressions.choice(*options)


def randint(upper: int) -> Any:
    """An integer from 0 up to, and without, `upper`."""
    return expressions.randint(upper)


def loguniform(min_value: float, max_value: float) -> Any:
    """exp(uniform(min_value, max_value))."""
    return expressions.loguniform(math.exp(min_value), math.exp(max_value))


def qloguniform(min_value: float, max_value: float, q: float) -> Any:
    """round(exp(uniform(min_value, max_value)) / q) * q."""
    return expressions.qloguniform(math.exp(min_value), math.exp(max_value), q)
