"""`azureml.train.hyperdrive`: hyperparameter tuning with Paceline's sweeps."""

from __future__ import annotations

from paceline.system.lazy_import import face

#: Module -> names in this module that can be imported from the package `azureml.train.hyperdrive`.
_HOMES = {
    "train.hyperdrive.search": "choice lognormal loguniform normal qlognormal qloguniform qnormal quniform randint uniform "
    "BanditPolicy EarlyTerminationPolicy MedianStoppingPolicy NoTerminationPolicy TruncationSelectionPolicy "
    "BayesianParameterSampling GridParameterSampling HyperParameterSampling RandomParameterSampling",
    "train.hyperdrive.run": "HyperDriveRun",
    "train.hyperdrive.runconfig": "HyperDriveConfig HyperDriveRunConfig PrimaryMetricGoal",
}

__all__ = [*" ".join(_HOMES.values()).split()]  # noqa: PLE0604 - the names are strings

__getattr__ = face(__name__, {f"paceline.compat.azureml.{home}": names.split() for home, names in _HOMES.items()})
