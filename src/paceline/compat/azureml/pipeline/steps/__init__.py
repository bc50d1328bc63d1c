"""`azureml.pipeline.steps`: the kinds of pipeline steps."""

from __future__ import annotations

from paceline.system.lazy_import import face

#: Module -> names in this module that can be imported from the package `azureml.pipeline.steps`.
_HOMES = {
    "pipeline.core.run": "HyperDriveStepRun",
    "pipeline.steps.parallel": "ParallelRunConfig ParallelRunStep",
    "pipeline.steps.steps": "CommandStep EstimatorStep MpiStep PythonScriptStep",
    "pipeline.steps.sweep": "HyperDriveStep",
    "refused": "AdlaStep AutoMLStep AutoMLStepRun AzureBatchStep DataTransferStep DatabricksStep KustoStep "
    "ModuleStep RScriptStep SynapseSparkStep",
}

__all__ = [*" ".join(_HOMES.values()).split()]  # noqa: PLE0604 - the names are strings

__getattr__ = face(__name__, {f"paceline.compat.azureml.{home}": names.split() for home, names in _HOMES.items()})
