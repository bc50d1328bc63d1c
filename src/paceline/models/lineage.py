"""The lineage of a model: its run, at the time of the registration.

The model's record holds all of it, because a run may be removed before its model.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from paceline.models.packages import ask, installed_here
from paceline.runs import series, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import json_safe
from paceline.runs.record import RunRecord
from paceline.system.files import read_json

#: Fields of an input in `data.json`.
_INPUT = ("name", "dataset", "fingerprint", "content", "sources", "files", "bytes", "mode")


def of_run(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    """Return the run's lineage as JSON.

    The keys are run_id, experiment, status, snapshot_id, git, source_directory, entry, arguments, framework, topology,
    environment, datasets and metrics.
    """
    job = record.job
    return {
        "run_id": record.run_id,
        "experiment": record.experiment,
        "parent_run_id": record.parent_run_id,
        "kind": record.kind,
        "status": _status(record),
        "submitted_by": record.submitted_by,
        "created_utc": record.created_utc,
        "snapshot_id": record.snapshot_id,
        "git": dict(record.git),
        "source_directory": record.source_directory,
        "entry": list(job.entry_words) if job else [],
        "arguments": list(job.arguments) if job else [],
        "framework": job.framework if job else None,
        "topology": _topology(record),
        "environment": _environment(folder, record),
        "datasets": _datasets(folder),
        "metrics": _metrics(folder),
    }


def _status(record: RunRecord) -> str:
    # The script may run before the supervisor has recorded that all workers have started.
    return states.RUNNING if record.status == states.STARTING and _is_own(record) else record.status


def _topology(record: RunRecord) -> dict[str, Any]:
    job = record.job
    found: dict[str, Any] = {"target": record.target, "attempts": len(record.attempts)}
    if record.attempts:
        found["nodes"] = list(record.attempts[-1].nodes)
    if job is not None:
        names = (
            *("node_count", "process_count_per_node", "world_size", "distributed_backend", "use_gpu"),
            *("worker_count", "parameter_server_count"),
        )
        found |= {name: getattr(job, name) for name in names}
    return found


def _environment(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    """Return the requested and the installed environment.

    asked: the request. locked: with exact versions, if built. python_version, packages: of the interpreter. seen: "in the run"
    or "at registration".
    """
    job, built = record.job, read_json(folder.environment)
    found: dict[str, Any] = {"asked": job.environment.to_json() if job else {}}
    if isinstance(built, dict):
        found |= {name: built.get(name) for name in ("key", "locked", "pip", "conda", "base_python", "is_layered")}
    if _is_own(record):
        return found | installed_here() | {"seen": "in the run"}
    if job is None:
        return found
    if job.environment.docker_image:
        return found | {"image": job.environment.docker_image}
    if isinstance(built, dict):
        return found | _asked(str(built.get("python")), built.get("variables") or {})
    # On another machine, the same path may be another interpreter.
    if record.target == "local":
        return found | _asked(job.environment.python or sys.executable, {})
    return found


def _is_own(record: RunRecord) -> bool:
    """Return True in a process of the run, or in the program that logs it."""
    if record.kind == "interactive" and store.was_here(record) and record.owner.get("pid") == os.getpid():
        return True
    return os.environ.get("PACELINE_RUN_ID") == record.run_id


def _asked(python: str, variables: dict[str, str]) -> dict[str, Any]:
    found = ask(python, variables)
    return found | {"seen": "at registration"} if found else {}


def _datasets(folder: RunFolder) -> list[dict[str, Any]]:
    told = read_json(folder.data)
    inputs = told.get("inputs", ()) if isinstance(told, dict) else ()
    # Every node reports its inputs; the first reports all that the nodes share.
    first = {one["name"]: one for one in reversed(list(inputs))}
    return [{name: first[each][name] for name in _INPUT if first[each].get(name)} for each in sorted(first)]


def _metrics(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for name, one in series.read(folder.metrics).items():
            last = one.last if isinstance(one.last, (int, float, str, bool)) else None
            found[name] = json_safe(
                {"last": last, "min": one.min, "max": one.max, "last_step": one.last_step, "count": len(one)}
            )
    return found
