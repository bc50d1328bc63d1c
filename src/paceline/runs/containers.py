"""Removes what a container engine still has of a run when the run is over.

`paceline.containers` is loaded for runs with an image alone: every run waits for what its supervisor loads.
"""

from __future__ import annotations

from paceline.errors import EngineError, LauncherError
from paceline.job.job import Job


def remove_containers(job: Job | None, run_id: str, *, all_ended: bool = False) -> None:
    """End what this machine's engine still has of the run; nothing for a run without an image. Never raises.

    all_ended: no client was killed, so that none has left a container in the making.
    """
    if job is None or job.environment.docker_image is None:
        return
    from paceline.containers import SETTLE_S, find_engine, remove

    try:
        remove(find_engine(to_start=False), run_id, settle_s=0.0 if all_ended else SETTLE_S)
    except (LauncherError, EngineError):
        return  # whoever took the engine away took its containers with it; one that is stuck ends none
