"""Paceline: run training, from one process to hundreds, on machines you already have.

The public names are loaded on first use. Importing this package loads only the exceptions (`paceline.errors`).
"""

from __future__ import annotations

from paceline import errors
from paceline.system.lazy_import import face, hand_down

# Type checkers recognize the name TYPE_CHECKING. Define it here, because importing `typing` takes longer than all other imports.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.data.datasets.dataset import Dataset
    from paceline.data.stores.datastore import Datastore
    from paceline.environments.environment import Environment
    from paceline.estimator import Estimator, PyTorch, SKLearn, TensorFlow
    from paceline.functions import FunctionJob, FunctionRun, FunctionRuns, job
    from paceline.job.data_reference import DataReference
    from paceline.job.job import Job
    from paceline.job.secret_values import secret
    from paceline.models.model import Model
    from paceline.parallel import (
        ContextParallel,
        DataParallel,
        ExpertParallel,
        FullyShard,
        PipelineParallel,
        TensorParallel,
        parallelize,
    )
    from paceline.pipelines.data import PipelineData, PipelineParameter
    from paceline.pipelines.pipeline import Pipeline
    from paceline.pipelines.pipeline_run import PipelineRun
    from paceline.pipelines.step import Step
    from paceline.runs.failure import FailureReport
    from paceline.runs.media import Audio, Histogram, Html, Image, Table, Video
    from paceline.runs.record import RunRecord
    from paceline.services.service import Service
    from paceline.sweeps.expressions import (
        choice,
        fixed,
        lognormal,
        loguniform,
        normal,
        qlognormal,
        qloguniform,
        qnormal,
        quniform,
        randint,
        uniform,
    )
    from paceline.sweeps.policies.asha import ASHA, Hyperband
    from paceline.sweeps.policies.policy import Bandit, MedianStopping, TruncationSelection
    from paceline.sweeps.policies.population import PopulationBasedTraining
    from paceline.sweeps.sweep import Sweep
    from paceline.sweeps.sweep_run import SweepRun
    from paceline.trackers.imports import import_runs
    from paceline.tracking import finish, init, log
    from paceline.workspace import Experiment, Run, Workspace

__version__ = "0.1.0"

# Register this function by name: the module `runs` needs it to read a run, but may not import the higher layer `targets`.
hand_down("target_of_run", "paceline.targets.configured")
# A call of the module `paceline.job` calls this decorator. Register it by name: `job` may not import `functions`.
hand_down("job", "paceline.functions.decorator")

# Public names that are loaded on first use. Each name must also be in the imports above, from which type checkers get its type.
_HOMES = {
    "paceline.data.datasets.dataset": ("Dataset",),
    "paceline.data.stores.datastore": ("Datastore",),
    "paceline.job.data_reference": ("DataReference",),
    "paceline.environments.environment": ("Environment",),
    "paceline.functions": ("FunctionJob", "FunctionRun", "FunctionRuns", "job"),
    "paceline.estimator": ("Estimator", "PyTorch", "SKLearn", "TensorFlow"),
    "paceline.job.job": ("Job",),
    "paceline.models.model": ("Model",),
    "paceline.parallel": (
        "ContextParallel",
        "DataParallel",
        "ExpertParallel",
        "FullyShard",
        "PipelineParallel",
        "TensorParallel",
        "parallelize",
    ),
    "paceline.pipelines.data": ("PipelineData", "PipelineParameter"),
    "paceline.pipelines.pipeline": ("Pipeline",),
    "paceline.pipelines.pipeline_run": ("PipelineRun",),
    "paceline.pipelines.step": ("Step",),
    "paceline.runs.failure": ("FailureReport",),
    "paceline.runs.media": ("Audio", "Histogram", "Html", "Image", "Table", "Video"),
    "paceline.runs.record": ("RunRecord",),
    "paceline.job.secret_values": ("secret",),
    "paceline.services.service": ("Service",),
    "paceline.sweeps.expressions": (
        "choice",
        "fixed",
        "lognormal",
        "loguniform",
        "normal",
        "qlognormal",
        "qloguniform",
        "qnormal",
        "quniform",
        "randint",
        "uniform",
    ),
    "paceline.sweeps.policies.asha": ("ASHA", "Hyperband"),
    "paceline.sweeps.policies.policy": ("Bandit", "MedianStopping", "TruncationSelection"),
    "paceline.sweeps.policies.population": ("PopulationBasedTraining",),
    "paceline.sweeps.sweep": ("Sweep",),
    "paceline.sweeps.sweep_run": ("SweepRun",),
    "paceline.tracking": ("finish", "init", "log"),
    "paceline.trackers.imports": ("import_runs",),
    "paceline.workspace": ("Experiment", "Run", "Workspace"),
}

__all__ = [
    "ASHA", "Audio", "Bandit", "ContextParallel", "DataParallel", "DataReference", "Dataset", "Datastore",
    "Environment", "Estimator", "Experiment", "ExpertParallel", "FailureReport", "FullyShard", "FunctionJob",
    "FunctionRun", "FunctionRuns", "Histogram", "Html", "Hyperband", "Image", "Job", "MedianStopping", "Model",
    "Pipeline", "PipelineData", "PipelineParallel", "PipelineParameter", "PipelineRun", "PopulationBasedTraining",
    "PyTorch", "Run", "RunRecord", "SKLearn", "Service", "Step", "Sweep", "SweepRun", "Table", "TensorFlow",
    "TensorParallel", "TruncationSelection", "Video", "Workspace", "__version__", "choice", "errors", "finish",
    "fixed", "import_runs", "init", "job", "log", "lognormal", "loguniform", "normal", "parallelize", "qlognormal",
    "qloguniform", "qnormal", "quniform", "randint", "secret", "uniform",
]  # fmt: skip

__getattr__ = face(__name__, _HOMES)


# Without this function, `dir(paceline)` and completion would list only loaded names.
def __dir__() -> list[str]:
    return __all__
