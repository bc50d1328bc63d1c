"""A run's JSON for `--json`, with equal keys in all verbs. New releases only add keys."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from paceline.cli.common import print_json
from paceline.job.job import Job
from paceline.observe import loads
from paceline.runs import metrics, read, tags_and_properties
from paceline.runs.artifacts import names
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.run_data import RunData, read_data
from paceline.system import linked
from paceline.system.files import read_json, tree_size
from paceline.system.names import some

if TYPE_CHECKING:
    from paceline.cli.outputs import BuiltPackages, GitState, LoadSample, RunSummary, ShownRun


def command_text(record: RunRecord) -> str:
    """Return the run's command, quoted for a shell, or "" for a sweep."""
    return shlex.join(record.command)


def summary(folder: RunFolder, record: RunRecord | None = None) -> RunSummary:
    """Return the JSON of `status`, `list`, `submit` and `run`. Without `record`, read the record."""
    # Import this module late, because `paceline run` does not need it.
    from paceline.runs.notebook import latest_metrics

    record = read.record(folder) if record is None else record
    noted = tags_and_properties.read(folder.notes)
    return {
        "run_id": record.run_id,
        "status": record.status,
        "experiment": record.experiment,
        "display_name": noted.name or record.run_id,
        "type": record.kind,
        "target": record.target,
        "node_count": record.job.node_count if record.job else None,
        "world_size": record.job.world_size if record.job else None,
        "distributed_backend": record.job.distributed_backend if record.job else None,
        "size": record.size,
        "command": command_text(record),
        "latest_metrics": {name: entry["value"] for name, entry in latest_metrics(folder).items()},
        "attempts": len(record.attempts),
        "created_utc": record.created_utc,
        "started_utc": record.started_utc,
        "ended_utc": record.ended_utc,
        "duration_s": record.duration_s,
        "waiting_for": record.waiting_for,
        "exit_code": record.exit_code,
        "failure": {"cause": record.failure.cause, "message": record.failure.message} if record.failure else None,
        "hang": record.hang,
        "warnings": list(record.warnings),
        "left_out": [{"name": one["name"], "why": one["why"]} for one in record.left_out],
        "left_out_count": record.left_out_count,
        "parent_run_id": record.parent_run_id,
        "tags": noted.tags,
        "folder": str(folder.path),
    }


def print_submitted(folder: RunFolder, hints: str, *, as_json: bool, quiet: bool = False) -> int:
    """Print a submitted run's id, and hints on standard error unless `quiet`. Return 0."""
    if as_json:
        print_json(summary(folder))
    else:
        # Print only the id on standard output, so that RUN=$(paceline submit ...) works.
        print(folder.run_id)
        if not quiet:
            print(f"\n{hints}", file=sys.stderr)
    return 0


def details(folder: RunFolder) -> ShownRun:
    """Return what `show` prints with --json: the keys of `summary`, and more keys."""
    # Import this module late, because `paceline run` does not need it.
    from paceline.models import registry

    record = read.record(folder)
    noted = tags_and_properties.read(folder.notes)
    return {
        **summary(folder, record),
        "properties": noted.properties,
        "description": noted.description,
        "submitted_by": record.submitted_by,
        "canceled_by": record.canceled_by,
        "source_directory": record.source_directory,
        "snapshot_id": record.snapshot_id,
        "not_copied": [asdict(one) for one in linked.read(folder.linked)],
        "git": cast("GitState", dict(record.git)),
        "job": record.job.shown() if record.job else None,
        "environment": read_json(folder.environment),
        "data": read_data(folder),
        "load": cast("LoadSample | None", loads.last(folder)),
        "attempt_records": [attempt.to_json() for attempt in record.attempts],
        "failure": record.failure.to_json() if record.failure else None,
        "trial": dict(record.trial) if record.trial else None,
        "step": dict(record.step) if record.step else None,
        "models": registry.ids_of_run(folder),
        "metrics": metrics.read(folder.metrics),
        "files": names(folder),
        "size_bytes": tree_size(folder.path),
    }


def environment_text(job: Job | None, built: BuiltPackages | None) -> str:
    """Return the script's environment, such as "image lab/torch:2" or "1f0c3a (layered): einops==0.8.1".

    Return "" if the script uses the interpreter that submitted the run.
    """
    if job is None:
        return ""
    environment = job.environment
    parts = [f"image {environment.docker_image}"] if environment.docker_image else []
    if built:
        packages = [*built.get("conda", ()), *built.get("pip", ())]
        kind = "layered" if built.get("is_layered") else "whole"
        parts.append(f"{built['key'][:12]} ({kind}): {some(packages, 6) or 'nothing to add'}")
    elif environment.python:
        parts.append(environment.python)
    return "; ".join(parts)


def data_texts(data: RunData) -> list[str]:
    """Return a line for each input and output: "train = lab:mnist/train, 12 files, 45.2 MB"."""
    lines = []
    for found in (*data["inputs"], *data["outputs"]):
        places = [
            f"{source['datastore']}:{source['path']}" if source.get("datastore") else str(source["path"])
            for source in found["sources"]
        ]
        text = f"{found['name']} {'->' if found.get('mode') == 'upload' else '='} {found.get('dataset') or ', '.join(places)}"
        if "files" in found:
            text += f", {found['files']} files, {found['bytes'] / 1e6:.1f} MB"
        if found.get("partition"):
            text += f" on node {found.get('node_rank', 0)}, a part for each {found['partition']}"
        lines.append(text)
    return lines
