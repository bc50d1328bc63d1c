"""Pipelines: graphs of ordinary runs, in which a step reads the files that another step has written.

This package exports the names that other packages use. Each name is imported on first use.
"""

from __future__ import annotations

from paceline.system.lazy_import import face

TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.pipelines.data import NOWHERE, PendingReference, check_parameters
    from paceline.pipelines.pipeline import submit_pipeline
    from paceline.pipelines.pipeline_run import step_records
    from paceline.pipelines.plan import Planned, ordered, spec_of, step_output
    from paceline.pipelines.spec import PipelineSpec

_HOMES = {
    "paceline.pipelines.data": ("NOWHERE", "PendingReference", "check_parameters"),
    "paceline.pipelines.pipeline": ("submit_pipeline",),
    "paceline.pipelines.pipeline_run": ("step_records",),
    "paceline.pipelines.plan": ("Planned", "ordered", "spec_of", "step_output"),
    "paceline.pipelines.spec": ("PipelineSpec",),
}

__all__ = [
    "NOWHERE",
    "PendingReference",
    "PipelineSpec",
    "Planned",
    "check_parameters",
    "ordered",
    "spec_of",
    "step_output",
    "step_records",
    "submit_pipeline",
]

__getattr__ = face(__name__, _HOMES)
