"""Leave nothing of a run on its node but what others may use again: data that was fetched, environments, images."""

from __future__ import annotations

from typing import Any

from paceline.job.job import Job
from paceline.runs.folder import RunFolder


def clean(job: Job, folder: RunFolder) -> dict[str, Any]:
    """End what a container engine still has of the run, and drop its views of the node's data."""
    remove_containers(job, folder)
    if any(not reference.is_output for reference in job.inputs):
        from paceline.data.transfer.cache import DataCache

        # What the run saw of the cache; the files themselves stay in it for the next run.
        DataCache().drop_views(folder.run_id)
    return {}


def remove_containers(job: Job, folder: RunFolder) -> dict[str, Any]:
    """End what a container engine still has of the run."""
    if job.environment.docker_image is not None:
        from paceline.containers import find_engine, remove

        # Twice in a run's life, so that it need not be long.
        remove(find_engine(to_start=False), folder.run_id, settle_s=0.25)
    return {}
