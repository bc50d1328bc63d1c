"""A pipeline's start: its record, the snapshots of its steps, and its controller."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.errors import JobError, UserError
from paceline.pipelines.spec import PipelineSpec, StepSpec
from paceline.runs import controllers, store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_experiment_name
from paceline.runs.record import RunRecord, user_name, utc_now
from paceline.snapshot import Progress, Snapshot, git_state
from paceline.submit import SourceCopy, being_started, check, places_of, take_snapshot, unrecorded, values_of
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import check_points


def submit_pipeline(
    spec: PipelineSpec,
    directories: Sequence[Path],
    workspace_dir: Path,
    experiment: str,
    *,
    run_id: str,
    tags: Mapping[str, object] | None = None,
    progress: Progress | None = None,
    display_name: str | None = None,
    values: Mapping[str, str] | None = None,
    leave_out: Sequence[Path] = (),
) -> RunFolder:
    """Start a pipeline and return its folder at once; it goes on when this program ends.

    directories: the source of each step. run_id: the one that `spec` was made for.
    values, leave_out: as for `paceline.submit.submit`; values for all steps.

    Raises:
        UserError: anything that can be known to be wrong before a process starts; the step is named.
        TargetError: the controller could not be started.
    """
    check_experiment_name(experiment)
    secrets: dict[str, str] = {}
    checked = []
    for step, directory in zip(spec.steps, directories, strict=True):
        job, given = unrecorded(step.job, values or {})
        checked.append(dataclasses.replace(step, job=job))
        for place, value in _checked(checked[-1], directory, workspace_dir, given).items():
            if secrets.setdefault(place, value) != value:
                raise JobError(
                    f"step {step.name!r} and another step have different secrets at {place!r}, which is one place. Put each "
                    "into a variable of its own and name it with paceline.secret(NAME)."
                )
    spec = dataclasses.replace(spec, steps=tuple(checked))
    copies: dict[Path, Snapshot] = {}
    steps = []
    for step, directory in zip(spec.steps, directories, strict=True):
        with _in_step(step):
            # Each looks for its own script in the copy; the files are taken once.
            taken = take_snapshot(
                step.job,
                SourceCopy(directory=directory.absolute()),
                workspace_dir,
                progress,
                leave_out,
                copies.get(directory.absolute()),
            )
        copies.setdefault(directory.absolute(), taken)
        steps.append(dataclasses.replace(step, snapshot_id=taken.id, git=git_state(directory)))
    spec = dataclasses.replace(spec, steps=tuple(steps))
    targets = {step.job.compute_target for step in steps}
    record = RunRecord(
        run_id=run_id,
        experiment=experiment,
        kind="pipeline",
        created_utc=utc_now(),
        submitted_by=user_name(),
        target=targets.pop() if len(targets) == 1 else None,
        source_directory=steps[0].source_directory,
        snapshot_id=steps[0].snapshot_id,
        git=steps[0].git,
        pipeline=spec.to_json(),
        owner=store.owner(),
    )
    # The lock is held from the folder's first moment: without it a reader would take the pipeline for deserted.
    lock_fd = store.create(workspace_dir / "runs", record, secrets)
    folder = RunFolder(workspace_dir / "runs" / run_id)
    first = copies[directories[0].absolute()]
    with being_started(folder, record, lock_fd, first, tags=tags, display_name=display_name):
        folder.sources.mkdir()
        for taken in {taken.id: taken for taken in copies.values()}.values():
            (folder.sources / taken.id).symlink_to(os.path.relpath(taken.path, folder.sources))
        controllers.start(folder, lock_fd)
    return folder


def _checked(step: StepSpec, directory: Path, workspace_dir: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Place of each of the step's secrets -> its value.

    Raises:
        UserError: the step can't run.
    """
    with _in_step(step):
        found = values_of(step.job, given)
        check(step.job, workspace_dir)
        if step.sweep is not None:
            check_points(step.job, SweepSpec.from_json(step.sweep), directory)
    # By their places: one variable may stand for different secrets in different steps.
    places = places_of(step.job)
    return {places[name]: value for name, value in found.items()}


@contextlib.contextmanager
def _in_step(step: StepSpec) -> Iterator[None]:
    """What is wrong is said with the step's name."""
    try:
        yield
    except UserError as error:
        error.args = (f"step {step.name!r}: {error}", *error.args[1:])
        raise
