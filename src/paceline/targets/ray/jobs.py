"""The jobs that a Ray cluster knows, asked at most once in some seconds for all runs of a workspace together.

    <workspace>/engines/ray-<hash of the address>.json     {"time": ..., "jobs": {id: {...}}} or {"time": ..., "error": ...}

Whoever finds the answer too old asks again, one process at a time; the others wait for that answer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.system.files import read_json, write_json
from paceline.targets.poll_cache import FRESH_S, answers_dir, locked
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
    found = _fresh(path)
    if found is None:
        with locked(path.with_suffix(".lock")) as is_held:
            if not is_held:
                # A workspace that is not ours to write: asked for this reader alone.
                return Jobs(time=time.time(), jobs=_mine(ask(), prefix))
            # Another process may have asked while this one waited for the lock.
            found = _fresh(path) or _asked(path, ask, prefix)
    if "error" in found:
        raise UnreachableError(found["error"])
    return Jobs(time=found["time"], jobs={key: RayJob(**value) for key, value in found["jobs"].items()})


def _fresh(path: Path) -> dict[str, Any] | None:
    found = read_json(path)
    if isinstance(found, dict) and 0 <= time.time() - float(found.get("time", 0.0)) < FRESH_S:
        return found
    return None


def _asked(path: Path, ask: Callable[[], list[RayJob]], prefix: str) -> dict[str, Any]:
    # The time before the call: what happens during the call may be missing in the answer.
    asked = time.time()
    try:
        found: dict[str, Any] = {
            "time": asked,
            "jobs": {key: asdict(job) for key, job in _mine(ask(), prefix).items()},
        }
    # A failure is kept as well: else each of hundreds of readers would wait for the time-out.
    except UnreachableError as error:
        found = {"time": time.time(), "error": str(error)}
    write_json(path, found)
    return found


def _mine(jobs: list[RayJob], prefix: str) -> dict[str, RayJob]:
    return {job.submission_id: job for job in jobs if job.submission_id.startswith(prefix)}
