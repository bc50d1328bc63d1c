"""Submit a run's job again, for `paceline rerun` and the live page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from paceline.environments.environment import Environment
from paceline.errors import RunStateError
from paceline.job.job import Job
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.runs.ids import new_run_id
from paceline.runs.record import RunRecord
from paceline.submit import SourceCopy, in_places_of, submit
from paceline.system.files import read_json


def rerun(
    before: RunFolder,
    workspace_dir: Path,
    *,
    values: Mapping[str, str] | None = None,
    display_name: str | None = None,
) -> RunFolder:
    """Submit the job of another run, with its source and the exact versions of its packages.

    `values` replace the values of secrets from the job's own sources.

    Raises:
        RunStateError: A program logged the run, or the run is a pipeline or a sweep.
        UserError, TargetError: As for `paceline.submit.submit`.
    """
    old = read.record(before)
    if old.pipeline is not None:
        raise RunStateError(
            f"run {old.run_id} is a pipeline. Submit it again as you did: its steps that have not changed are not run twice."
        )
    if old.sweep is not None:
        # A sweep's own job lacks the values of a trial, so it never ran.
        raise RunStateError(
            f"run {old.run_id} is a sweep. Ask for further trials, paceline sweep more {old.run_id} --trials N, run one of its "
            "trials again by its own id, or submit the sweep again as you did."
        )
    if old.job is None or old.snapshot_id is None:
        raise RunStateError(f"run {old.run_id} was not submitted but logged by a program, which alone can run again.")
    run_id = new_run_id(old.experiment)
    return submit(
        _with_own_places(_with_locked_environment(old.job, before), old, run_id),
        # The snapshot is what runs. The folder, which may be gone, is only recorded.
        SourceCopy(directory=Path(old.source_directory or "."), snapshot_id=old.snapshot_id, git=old.git),
        workspace_dir,
        old.experiment,
        tags={"rerun_of": old.run_id},
        display_name=display_name,
        values=values,
        run_id=run_id,
    )


def _with_own_places(job: Job, old: RunRecord, run_id: str) -> Job:
    """Return the job of a pipeline's step, with the new run's id in the paths of its outputs."""
    if old.step is None:
        return job
    return in_places_of(job, run_id, old.step.get("reused_from") or old.run_id)


def _with_locked_environment(job: Job, folder: RunFolder) -> Job:
    """Return the job with the installed versions of its environment, if one was built."""
    built = read_json(folder.environment)
    if not built:
        return job
    return dataclasses.replace(job, environment=Environment.from_json(built["locked"]))
