"""How the steps of a pipeline stand."""

from __future__ import annotations

from typing import Any

from paceline.controlling.child import record_of
from paceline.pipelines.spec import PipelineSpec, child_id
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord

#: Of a step without a run: it waits for others; or it will never begin, for one that it needs has not Completed.
WAITING, SKIPPED = "NotStarted", "Skipped"


def records(folder: RunFolder, spec: PipelineSpec) -> list[RunRecord | None]:
    """The record of each step's run; None where it has not begun, or its run was removed."""
    return [record_of(RunFolder(folder.path.parent / child_id(folder.run_id, n))) for n in range(len(spec.steps))]


def rows(folder: RunFolder, pipeline: RunRecord) -> list[dict[str, Any]]:
    """A mapping for each step: number, step (its name), run_id, status, after (names), reused_from, target, started_utc,
    duration_s, failure (its message). run_id is None before the step begins; one that will never begin is Skipped.
    """
    spec = PipelineSpec.from_json(pipeline.pipeline or {})
    found = []
    for number, (step, record) in enumerate(zip(spec.steps, records(folder, spec), strict=True)):
        told = {
            "number": number,
            "step": step.name,
            "run_id": None,
            "status": SKIPPED if pipeline.is_terminal else WAITING,
            "after": [spec.steps[other].name for other in step.after],
            "reused_from": None,
            "target": step.job.compute_target,
            "started_utc": None,
            "duration_s": None,
            "failure": None,
        }
        if record is not None:
            told |= {
                "run_id": record.run_id,
                "status": record.status,
                "reused_from": (record.step or {}).get("reused_from"),
                "started_utc": record.started_utc,
                "duration_s": record.duration_s,
                "failure": record.failure.message if record.failure else None,
            }
        found.append(told)
    return found
