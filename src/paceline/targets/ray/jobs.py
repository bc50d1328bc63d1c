"""The jobs that a Ray cluster knows, asked at most once in some seconds for all runs of a workspace together.

<workspace>/engines/ray-<hash of the address>.json     {"told", "time", "jobs": {id: {...}}} or {"told", "error"}
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.targets.poll_cache import answer, answers_dir
from paceline.targets.ray.client import RayJob, UnreachableError


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """An answer of the cluster's. time: when it was asked, seconds since the epoch."""

    time: float
    jobs: dict[str, RayJob] = field(default_factory=dict)


def all_jobs(workspace_dir: Path, address: str, ask: Callable[[], list[RayJob]], prefix: str) -> Jobs:
    """The jobs whose ids begin with `prefix`, no older than `FRESH_S`.

    Raises:
        UnreachableError: the cluster did not answer, when it was last asked.
    """
    path = answers_dir(workspace_dir) / f"ray-{hashlib.sha256(address.encode()).hexdigest()[:12]}.json"
    found = answer(path, lambda: _asked(ask, prefix))
    if "error" in found:
        raise UnreachableError(found["error"])
    return Jobs(time=found["time"], jobs={key: RayJob(**value) for key, value in found["jobs"].items()})


def _asked(ask: Callable[[], list[RayJob]], prefix: str) -> dict[str, Any]:
    # The time before the call: what happens during the call may be missing in the answer.
    asked = time.time()
    try:
        jobs = {job.submission_id: asdict(job) for job in ask() if job.submission_id.startswith(prefix)}
    # A failure is kept as well: else each of hundreds of readers would wait for the time-out.
    except UnreachableError as error:
        return {"told": time.time(), "error": str(error)}
    return {"told": time.time(), "time": asked, "jobs": jobs}
