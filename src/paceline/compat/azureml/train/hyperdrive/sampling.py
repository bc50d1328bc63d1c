"""Samplers (`azureml.train.hyperdrive.sampling`)."""

from __future__ import annotations

from typing import ClassVar

from paceline.compat.azureml.exceptions import HyperDriveConfigException
from paceline.sweeps import Choice, Uniform

__all__ = [
    "BayesianParameterSampling",
    "GridParameterSampling",
    "HyperParameterSampling",
    "RandomParameterSampling",
]


class HyperParameterSampling:
    """A sampler.

    `parameter_space` maps names, with or without dashes, to expressions.

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
    """A sampler that learns from results, by Optuna's TPE (the extra `tune`)."""

    sampler = "tpe"
    _takes = (Choice, Uniform)
