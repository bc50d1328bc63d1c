"""The Azure Machine Learning SDK v1 (`azureml`) on one's own machines: its names, its calls and its exceptions, for drivers and
training scripts that were written for it.

In a worker `import azureml.core` finds this package by itself; in a driver after `import paceline.azureml`, or under
`python -m paceline.azureml driver.py`. docs/from-azureml.md has every name. https://learn.microsoft.com/python/api/overview/azure/ml
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.compat.azureml.core.experiment import Experiment
    from paceline.compat.azureml.core.run import Run

__all__ = ["Experiment", "Run"]

_MODULES = ("core", "data", "exceptions", "pipeline", "telemetry", "tensorboard", "train", "widgets", "opendatasets")


def __getattr__(name: str) -> object:
    # `import azureml` and then `azureml.core.VERSION`: so the first cells of many notebooks have it.
    if name in _MODULES:
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(f"module 'azureml' has no attribute {name!r}") from error
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.core.{name.lower()}"), name)
    # Another distribution's, such as azureml-mlflow: `import azureml.mlflow.x as y` while azureml.mlflow itself is being loaded.
    if (beside := sys.modules.get(f"azureml.{name}")) is not None:
        return beside
    raise AttributeError(f"module 'azureml' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
