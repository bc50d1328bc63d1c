"""`azureml.pipeline.steps`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.system.lazy_import import face

if TYPE_CHECKING:
    from paceline.compat.azureml.pipeline.core.run import HyperDriveStepRun
    from paceline.compat.azureml.pipeline.steps.parallel import ParallelRunConfig, ParallelRunStep
    from paceline.compat.azureml.pipeline.steps.steps import (
        CommandStep,
        EstimatorStep,
        MpiStep,
        PythonScriptStep,
    )
    from paceline.compat.azureml.pipeline.steps.sweep import HyperDriveStep
    from paceline.compat.azureml.refused import (
        AdlaStep,
        AutoMLStep,
        AutoMLStepRun,
        AzureBatchStep,
        DatabricksStep,
        DataTransferStep,
        KustoStep,
        ModuleStep,
        RScriptStep,
        SynapseSparkStep,
    )

__all__ = [
    "AdlaStep",
    "AutoMLStep",
    "AutoMLStepRun",
    "AzureBatchStep",
    "CommandStep",
    "DataTransferStep",
    "DatabricksStep",
    "EstimatorStep",
    "HyperDriveStep",
    "HyperDriveStepRun",
    "KustoStep",
    "ModuleStep",
    "MpiStep",
    "ParallelRunConfig",
    "ParallelRunStep",
    "PythonScriptStep",
    "RScriptStep",
    "SynapseSparkStep",
]

__getattr__ = face(
    __name__,
    {
        "paceline.compat.azureml.pipeline.core.run": ("HyperDriveStepRun",),
        f"{__name__}.parallel": ("ParallelRunConfig", "ParallelRunStep"),
        "paceline.compat.azureml.refused": (
            "AdlaStep",
            "AutoMLStep",
            "AutoMLStepRun",
            "AzureBatchStep",
            "DatabricksStep",
            "DataTransferStep",
            "KustoStep",
            "ModuleStep",
            "RScriptStep",
            "SynapseSparkStep",
        ),
        f"{__name__}.steps": ("CommandStep", "EstimatorStep", "MpiStep", "PythonScriptStep"),
        f"{__name__}.sweep": ("HyperDriveStep",),
    },
)
