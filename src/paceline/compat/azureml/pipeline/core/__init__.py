"""`azureml.pipeline.core`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.system.lazy_import import face

if TYPE_CHECKING:
    from paceline.compat.azureml.pipeline.core.builder import PipelineData, PipelineStep, StepSequence
    from paceline.compat.azureml.pipeline.core.graph import (
        InputPortBinding,
        OutputPortBinding,
        PipelineParameter,
        PortDataReference,
        TrainingOutput,
    )
    from paceline.compat.azureml.pipeline.core.pipeline import Pipeline
    from paceline.compat.azureml.pipeline.core.published import (
        Module,
        ModuleVersion,
        PipelineDraft,
        PipelineEndpoint,
        PublishedPipeline,
    )
    from paceline.compat.azureml.pipeline.core.run import PipelineRun, StepRun, StepRunOutput
    from paceline.compat.azureml.pipeline.core.schedule import Schedule, ScheduleRecurrence, TimeZone

__all__ = [
    "InputPortBinding",
    "Module",
    "ModuleVersion",
    "OutputPortBinding",
    "Pipeline",
    "PipelineData",
    "PipelineDraft",
    "PipelineEndpoint",
    "PipelineParameter",
    "PipelineRun",
    "PipelineStep",
    "PortDataReference",
    "PublishedPipeline",
    "Schedule",
    "ScheduleRecurrence",
    "StepRun",
    "StepRunOutput",
    "StepSequence",
    "TimeZone",
    "TrainingOutput",
]

__getattr__ = face(
    __name__,
    {
        f"{__name__}.builder": ("PipelineData", "PipelineStep", "StepSequence"),
        f"{__name__}.graph": (
            "InputPortBinding",
            "OutputPortBinding",
            "PipelineParameter",
            "PortDataReference",
            "TrainingOutput",
        ),
        f"{__name__}.pipeline": ("Pipeline",),
        f"{__name__}.published": ("Module", "ModuleVersion", "PipelineDraft", "PipelineEndpoint", "PublishedPipeline"),
        f"{__name__}.run": ("PipelineRun", "StepRun", "StepRunOutput"),
        f"{__name__}.schedule": ("Schedule", "ScheduleRecurrence", "TimeZone"),
    },
)
