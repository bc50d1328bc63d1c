"""Reuse the outputs of a former run with equal inputs, source, job and environment.

The file `<workspace>/pipelines/<key>.json` contains the id of the last run whose cache key is `<key>`. The file is ignored
if the record of that run has another key, or if the outputs of that run no longer exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.job.data_reference import DataReference
from paceline.job.job import Job
from paceline.pipelines.spec import StepSpec
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, StepEntry, user_name, utc_now
from paceline.runs.run_data import OutputData, read_data, write_data
from paceline.system.files import copy_tree, read_json, write_json

#: Version of the cache key's format. Each key contains it. Change the version when `key_of` changes.
_VERSION = "paceline step 1"


def key_of(step: StepSpec, job: Job, workspace_dir: Path) -> str:
    """Return a step's cache key, a hash of everything that determines its outputs.

    `job`: The step's job, with the actual locations of its inputs.

    Raises:
        DataError, TransferError: An input cannot be listed.
    """
    # Leave out the receivers of messages, because the step's outputs do not depend on them.
    key_parts = {**job.to_json(), "notify": []}
    del key_parts["notify_on"]
    # Output places differ from run to run, so only the places of inputs are in the key.
    key_parts["inputs"] = [
        {**reference.to_json(), "sources": None} if reference.is_output else _content(reference, workspace_dir)
        for reference in job.inputs
    ]
    # A job without an environment uses the packages of this interpreter.
    python = None if job.environment.needs_build else (sys.executable, sys.version)
    text = json.dumps([_VERSION, step.snapshot_id, key_parts, python], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find(key: str, workspace_dir: Path, pipeline_id: str) -> RunRecord | None:
    """Return another pipeline's run with this cache key and existing outputs, or None."""
    named = read_json(_path(key, workspace_dir))
    run_id = named.get("run_id") if isinstance(named, dict) else None
    if not isinstance(run_id, str):
        return None
    try:
        record = store.stored(RunFolder(workspace_dir / "runs" / run_id))
        is_equal = record.status == states.COMPLETED and (record.step or StepEntry()).get("key") == key
        # Do not reuse a run of this same pipeline: if two of its steps are equal, both steps have to run.
        is_other = record.parent_run_id != pipeline_id
        return record if is_equal and is_other and _is_there(record, workspace_dir) else None
    except PacelineError:
        return None


def note(record: RunRecord, workspace_dir: Path) -> None:
    """Record a Completed step's run for reuse by its cache key."""
    entry = record.step or StepEntry()
    # Don't record a run that itself reuses another run's outputs: later runs should depend on the original run only.
    if (key := entry.get("key")) and not entry.get("reused_from"):
        path = _path(key, workspace_dir)
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"run_id": record.run_id})


def take_over(
    former: RunRecord, step: StepSpec, run_id: str, entry: StepEntry, parent: RunRecord, runs_dir: Path
) -> None:
    """Create the Completed run of a step that reuses a former run's outputs.

    The new run gets copies of the former run's outputs, metrics and artifacts.

    `entry`: The field `step` of the new run's record, still without `reused_from`.
    """
    source, now = RunFolder(runs_dir / former.run_id), utc_now()
    record = RunRecord(
        run_id=run_id,
        experiment=parent.experiment,
        parent_run_id=parent.run_id,
        step={**entry, "reused_from": former.run_id},
        created_utc=now,
        started_utc=now,
        submitted_by=user_name(),
        target=former.target,
        source_directory=step.source_directory,
        snapshot_id=step.snapshot_id,
        git=step.git,
        # Use the earlier run's job instead of this step's job, because the earlier job has the paths of the existing outputs.
        job=former.job,
        owner=store.owner(),
    )
    fd = store.create(runs_dir, record)
    try:
        folder = RunFolder(runs_dir / run_id)
        folder.snapshot.symlink_to(os.path.relpath(runs_dir.parent / "snapshots" / str(step.snapshot_id), folder.path))
        for there in filter(Path.is_dir, (source.outputs, source.metrics, source.artifacts)):
            copy_tree(there, folder.path / there.name)
        if source.data.exists():
            write_data(folder, read_data(source))
        store.change(folder, record, states.COMPLETED, digest=None, exit_code=0, ended_utc=utc_now())
    finally:
        os.close(fd)


def _path(key: str, workspace_dir: Path) -> Path:
    return workspace_dir / "pipelines" / f"{key}.json"


def _content(reference: DataReference, workspace_dir: Path) -> dict[str, object]:
    from paceline.data.transfer.listing import fingerprint, list_files

    # List the files of outputs and registered datasets too: their place may be fixed, and their files may have changed.
    return {**reference.to_json(), "content": fingerprint(list_files(reference.sources, workspace_dir))}


def _is_there(record: RunRecord, workspace_dir: Path) -> bool:
    outputs = read_data(RunFolder(workspace_dir / "runs" / record.run_id))["outputs"]
    stored = {output["name"]: output for output in outputs}
    for reference in record.job.inputs if record.job else ():
        if not reference.is_output:
            continue
        # Later runs may have written to a place without this run's id.
        if any(record.run_id not in source.path for source in reference.sources):
            return False
        from paceline.data.transfer.listing import list_files

        files = list_files(reference.sources, workspace_dir)
        recorded = stored.get(reference.name, OutputData())
        counted = (len(files), sum(info.size for info in files))
        if "files" in recorded and counted != (recorded["files"], recorded["bytes"]):
            return False
    return True
