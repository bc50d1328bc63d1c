"""The lineage of a model: facts about its run at registration.

The model's record contains the whole lineage, because the run may be removed before the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from paceline.data.transfer.progress import Meter, Progress
from paceline.errors import ModelError
from paceline.models import registry
from paceline.models.record import Lineage, MetricSummary, ModelRecord, RunEnvironment, TrainingData
from paceline.models.sources import ModelSource
from paceline.runs import read, series, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import json_safe
from paceline.runs.record import RunRecord
from paceline.runs.remote_status import is_copy
from paceline.runs.run_data import InputData, inputs_by_name
from paceline.system.files import read_json

#: The fields of an input in a run's `data.json` that a model's lineage includes.
_INPUT = ("name", "dataset", "fingerprint", "content", "sources", "files", "bytes", "mode")

_TIMEOUT_S = 60.0
_MARK = "PACELINE-PACKAGES "


def of_run(folder: RunFolder, record: RunRecord) -> Lineage:
    """Return the current facts about a run as a model's lineage."""
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


def _topology(record: RunRecord) -> dict[str, object]:
    job = record.job
    topology: dict[str, object] = {"target": record.target, "attempts": len(record.attempts)}
    if record.attempts:
        topology["nodes"] = list(record.attempts[-1].nodes)
    if job is not None:
        names = (
            *("node_count", "process_count_per_node", "world_size", "distributed_backend", "use_gpu"),
            *("worker_count", "parameter_server_count"),
        )
        topology |= {name: getattr(job, name) for name in names}
    return topology


def _environment(folder: RunFolder, record: RunRecord) -> RunEnvironment:
    job, built = record.job, read_json(folder.environment)
    environment: RunEnvironment = {"asked": job.environment.to_json() if job else {}}
    if isinstance(built, dict):
        names = ("key", "locked", "pip", "conda", "base_python", "is_layered")
        environment.update(cast(RunEnvironment, {name: built.get(name) for name in names}))
    if _is_own(record):
        return _with_packages(environment, installed_here(), "in the run")
    if job is None:
        return environment
    if job.environment.docker_image:
        return {**environment, "image": job.environment.docker_image}
    if isinstance(built, dict):
        packages = ask(str(built.get("python")), built.get("variables") or {})
        return _with_packages(environment, packages, "at registration")
    # On another machine, the same path may be another interpreter.
    if record.target == "local":
        packages = ask(job.environment.python or sys.executable, {})
        return _with_packages(environment, packages, "at registration")
    return environment


def _is_own(record: RunRecord) -> bool:
    if record.kind == "interactive" and store.was_here(record) and record.owner.get("pid") == os.getpid():
        return True
    return os.environ.get("PACELINE_RUN_ID") == record.run_id


def _with_packages(environment: RunEnvironment, packages: dict[str, object], seen: str) -> RunEnvironment:
    return cast(RunEnvironment, {**environment, **packages, "seen": seen}) if packages else environment


def _datasets(folder: RunFolder) -> list[InputData]:
    inputs = sorted(inputs_by_name(folder).items())
    return [cast(InputData, {name: data.get(name) for name in _INPUT if data.get(name)}) for _, data in inputs]


def _metrics(folder: RunFolder) -> dict[str, MetricSummary]:
    metrics: dict[str, MetricSummary] = {}
    with contextlib.suppress(OSError):
        for name, values in series.read(folder.metrics).items():
            last = values.last if isinstance(values.last, (int, float, str, bool)) else None
            metrics[name] = json_safe(
                {
                    "last": last,
                    "min": values.min,
                    "max": values.max,
                    "last_step": values.last_step,
                    "count": len(values),
                }
            )
    return metrics


def add_with_lineage(
    workspace_dir: Path,
    name: str,
    source: ModelSource,
    came_from: RunFolder | None,
    *,
    datasets: Sequence[tuple[str, object]] | None,
    progress: Progress | None,
    **more: Any,
) -> ModelRecord:
    """Register files as a model's next version, with the lineage of run `came_from`, if any."""
    used = [_training_data(pair) for pair in datasets or ()]
    run = None if came_from is None else of_run(came_from, read.record(came_from))
    meter = Meter(progress, source.size_bytes, len(source.files))
    record = registry.add(workspace_dir, name, source, run=run, datasets=used, on_read=meter.add, **more)
    meter.finish(files=len(source.files))
    return record


def _training_data(given: object) -> TrainingData:
    if not (isinstance(given, (tuple, list)) and len(given) == 2):
        raise ModelError(f"datasets: {given!r} is not (purpose, dataset), such as ('training', dataset).")
    purpose, dataset = given
    name, version = getattr(dataset, "name", None), getattr(dataset, "version", None)
    return {
        "purpose": str(purpose),
        "dataset": f"{name}:{version}" if name and version else name or str(dataset),
        "fingerprint": getattr(dataset, "fingerprint", None),
    }


def check_home(folder: RunFolder) -> None:
    """Raise ModelError in a process that does not see the workspace.

    A process on a node or in a container may see only a copy of the run's folder. A model registered there would be lost.
    """
    if os.environ.get("PACELINE_RUN_ID") != folder.run_id:
        return
    job = store.stored(folder).job
    if job is not None and job.environment.docker_image:
        where = f"in a container, which has the folder of run {folder.run_id}"
    elif not folder.lock.exists() or is_copy(folder):
        where = f"on a node that has a copy of the folder of run {folder.run_id}"
    else:
        return
    raise ModelError(
        f"this process is {where}, and not the workspace that its models belong to. Leave the files in outputs, and register "
        f"them where the run was submitted: run.register_model(...), or paceline model register NAME PATH --run {folder.run_id}."
    )


def run_folder(workspace_dir: Path, run: object) -> RunFolder:
    """Return the folder of a `Run` or run id."""
    return store.find(workspace_dir / "runs", run if isinstance(run, str) else str(getattr(run, "id", run)))


def installed_here() -> dict[str, object]:
    """Return this interpreter's path and version, and "name==version" of each distribution."""
    versions = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        # Of two distributions with one name, `import` uses the first.
        if name and name.lower() not in versions:
            versions[name.lower()] = "%s==%s" % (name, distribution.version)  # noqa: UP031
    return {
        "python": sys.executable,
        "python_version": platform.python_version(),
        "packages": [versions[name] for name in sorted(versions)],
    }


def ask(python: str, variables: dict[str, str]) -> dict[str, object]:
    """Return path, version and packages of the interpreter `python`; {} without an answer.

    variables: Environment variables to add for the interpreter.
    """
    if os.path.realpath(python) == os.path.realpath(sys.executable) and not variables and sys.prefix == _prefix(python):
        return installed_here()
    with open(__file__, encoding="utf-8") as own:
        text = own.read() + "\nprint(%r + json.dumps(installed_here()))\n" % _MARK  # noqa: UP031
    try:
        done = subprocess.run(
            [python, "-"],
            input=text.encode(),
            capture_output=True,
            env={**os.environ, **variables, "PYTHONSAFEPATH": "1"},
            timeout=_TIMEOUT_S,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            answer = json.loads(line[len(_MARK) :])
            return answer if isinstance(answer, dict) else {}
    return {}


def _prefix(python: str) -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(python)))
