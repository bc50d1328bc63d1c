"""`azureml.pipeline.core`."""

from __future__ import annotations

from paceline.system.lazy_import import face

_HOMES = {
    "pipeline.core.builder": ("PipelineData", "PipelineStep", "StepSequence"),
    "pipeline.core.graph": (
        "InputPortBinding",
        "OutputPortBinding",
        "PipelineParameter",
        "PortDataReference",
        "TrainingOutput",
    ),
    "pipeline.core.pipeline": ("Pipeline",),
    "pipeline.core.run": ("PipelineRun", "StepRun", "StepRunOutput"),
    "refused": (
        "Module",
        "ModuleVersion",
        "PipelineDraft",
        "PipelineEndpoint",
        "PublishedPipeline",
        "Schedule",
        "ScheduleRecurrence",
        "TimeZone",
    ),
}

__all__ = [*(name for names in _HOMES.values() for name in names)]  # noqa: PLE0604 - the names are strings

__getattr__ = face(__name__, {f"paceline.compat.azureml.{home}": names for home, names in _HOMES.items()})
