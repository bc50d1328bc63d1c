"""The page of a pipeline's steps."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.routing import Route

from paceline.pipelines import pipeline_run
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.ui.render import TemplateValues
from paceline.ui.views import common


def routes() -> list[Route]:
    """Return the routes of a pipeline's page."""
    return common.routes("steps", steps)


def steps(folder: RunFolder, record: RunRecord) -> TemplateValues:
    """Return the steps of a pipeline; raise HTTPException (404) for other runs."""
    if record.pipeline is None:
        raise HTTPException(404, f"run {record.run_id} is not a pipeline; its kind is {record.kind}.")
    rows = pipeline_run.rows(folder, record)
    for row in rows:
        if row["status"] not in ("Completed", "Failed", "Canceled"):
            # The page itself counts the seconds of a running step. A duration here would change the page at each poll.
            row["duration_s"] = 0.0 if row["started_utc"] else None
    return {"steps": rows, "parameters": (record.pipeline or {}).get("parameters") or {}}
