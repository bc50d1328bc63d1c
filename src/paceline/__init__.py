"""Paceline: run training, from one process to hundreds, on machines you already have.

The public names, loaded on first use: importing this package loads nothing but the exceptions (`paceline.errors`).
"""

from __future__ import annotations

from paceline import errors
from paceline.system.lazy import face

# Not typing's: importing typing would take longer than all the rest. Type checkers go by the name.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.data.datasets.dataset import Dataset
    from paceline.data.stores.datastore import Datastore
    from paceline.environments.environment import Environment
    from paceline.estimator import Estimator, PyTorch, SKLearn, TensorFlow
    from paceline.job.data_reference import DataReference
    from paceline.job.job import Job
    from paceline.job.secret_values import secret
    from paceline.parallel.api import parallelize
    from paceline.parallel.strategy import DataParallel, FullyShard, PipelineParallel, TensorParallel
    from paceline.runs.failure import FailureReport
    from paceline.runs.record import RunRecord
    from paceline.workspace import Experiment, Run, Workspace

__version__ = "0.1.0"

_HOMES = {
    "paceline.data.datasets.dataset": ("Dataset",),
    "paceline.data.stores.datastore": ("Datastore",),
    "paceline.job.data_reference": ("DataReference",),
    "paceline.environments.environment": ("Environment",),
    "paceline.estimator": ("Estimator", "PyTorch", "SKLearn", "TensorFlow"),
    "paceline.job.job": ("Job",),
    "paceline.parallel.api": ("parallelize",),
    "paceline.parallel.strategy": ("DataParallel", "FullyShard", "PipelineParallel", "TensorParallel"),
    "paceline.runs.failure": ("FailureReport",),
    "paceline.runs.record": ("RunRecord",),
    "paceline.job.secret_values": ("secret",),
    "paceline.workspace": ("Experiment", "Run", "Workspace"),
}

__all__ = [
    "DataParallel",
    "DataReference",
    "Dataset",
    "Datastore",
    "Environment",
    "Estimator",
    "Experiment",
    "FailureReport",
    "FullyShard",
    "Job",
    "PipelineParallel",
    "PyTorch",
    "Run",
    "RunRecord",
    "SKLearn",
    "TensorFlow",
    "TensorParallel",
    "Workspace",
    "__version__",
    "errors",
    "parallelize",
    "secret",
]

__getattr__ = face(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
