"""The Azure Machine Learning SDK v1 (`azureml`) on Paceline.

This package has the SDK's names and exceptions, for drivers (programs that submit runs) and for training scripts. In a
worker, `import azureml.core` loads this package without further setup. A driver must first `import paceline.azureml`,
or be started as `python -m paceline.azureml driver.py`. docs/from-azureml.md lists every name.
https://learn.microsoft.com/python/api/overview/azure/ml
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
    # Import submodules on first use: many notebooks only write `import azureml`, and then use `azureml.core.VERSION`.
    if name in _MODULES:
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(f"module 'azureml' has no attribute {name!r}") from error
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.core.{name.lower()}"), name)
    # During `import azureml.mlflow.x as y`, Python looks up azureml.mlflow here while that module is still loading. The module
    # azureml.mlflow belongs to another package.
    if (beside := sys.modules.get(f"azureml.{name}")) is not None:
        return beside
    raise AttributeError(f"module 'azureml' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
