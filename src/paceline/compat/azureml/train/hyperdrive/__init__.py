"""`azureml.train.hyperdrive`: hyperparameter tuning with Paceline's sweeps."""

from __future__ import annotations

from paceline.system.lazy_import import face

_HOMES = {
    "train.hyperdrive.parameter_expressions": (
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
    ),
    "train.hyperdrive.policy": (
        "BanditPolicy",
        "EarlyTerminationPolicy",
        "MedianStoppingPolicy",
        "NoTerminationPolicy",
        "TruncationSelectionPolicy",
    ),
    "train.hyperdrive.run": ("HyperDriveRun",),
    "train.hyperdrive.runconfig": ("HyperDriveConfig", "HyperDriveRunConfig", "PrimaryMetricGoal"),
    "train.hyperdrive.sampling": (
        "BayesianParameterSampling",
        "GridParameterSampling",
        "HyperParameterSampling",
        "RandomParameterSampling",
    ),
}

__all__ = [*(name for names in _HOMES.values() for name in names)]  # noqa: PLE0604 - the names are strings

__getattr__ = face(__name__, {f"paceline.compat.azureml.{home}": names for home, names in _HOMES.items()})
