"""Runs and experiments with the spellings of the Azure Machine Learning SDK v1 (`azureml.core`), for programs written for it.

    from paceline.compat.azureml import Experiment, Run

Paceline's own `Run` and `Experiment` have what a run needs; these add the SDK's other names for the same, and its dict of
details. https://learn.microsoft.com/python/api/azureml-core/azureml.core.run.run
"""

from __future__ import annotations

from paceline.system.lazy import face

# Not typing's, as in `paceline`.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.compat.azureml.experiment import Experiment, Run

__all__ = ["Experiment", "Run"]

# Run, too, is loaded by way of `experiment`, which tells it how to make an experiment of this package: a run that is found by its
# id makes one for itself.
_HOMES = {"paceline.compat.azureml.experiment": ("Experiment", "Run")}

__getattr__ = face(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
