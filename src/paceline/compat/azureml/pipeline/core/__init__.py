"""`azureml.pipeline.core`: pipelines, their steps and their data."""

from __future__ import annotations

from paceline.system.lazy_import import face

#: Module -> names in this module that can be imported from the package `azureml.pipeline.core`.
_HOMES = {
    "pipeline.core.builder": "PipelineData PipelineStep StepSequence",
    "pipeline.core.graph": "InputPortBinding OutputPortBinding PipelineParameter PortDataReference TrainingOutput",
    "pipeline.core.pipeline": "Pipeline",
    "pipeline.core.run": "PipelineRun StepRun StepRunOutput",
    "refused": "Module ModuleVersion PipelineDraft PipelineEndpoint PublishedPipeline Schedule "
    "ScheduleRecurrence TimeZone",
}

__all__ = [*" ".join(_HOMES.values()).split()]  # noqa: PLE0604 - the names are strings

__getattr__ = face(__name__, {f"paceline.compat.azureml.{home}": names.split() for home, names in _HOMES.items()})
