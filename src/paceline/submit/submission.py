"""Flows of a submission: a new run, many alike, and one that was cut off."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import snapshot
from paceline.environments.sdk_packages import without_sdk_packages
from paceline.errors import PacelineError, TargetError
from paceline.job.job import Job
from paceline.runs import states, store, tags_and_properties
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_experiment_name, new_run_id
from paceline.runs.record import RunRecord, user_name, utc_now
from paceline.submit.checks import check_on
from paceline.submit.source import SourceCopy, take_snapshot
from paceline.submit.values import unrecorded, values_of
from paceline.system import linked, locks
from paceline.system.detached_process import library_dir
from paceline.system.files import PRIVATE, write_json
from paceline.targets import Target, configured
from paceline.targets.base import Alike, EarlyStart

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Submission:
    """A checked job with its target and the copy of its source, of which runs can be started."""

    job: Job
    source: SourceCopy
    workspace_dir: Path
    described: configured.Configured
    target: Target
    taken: snapshot.Snapshot

    def start(self, folder: RunFolder, record: RunRecord, lock_fd: int, **notes: Any) -> None:
        """Start the supervisor of a run whose folder exists. `notes` are those of `being_started`."""
        with self.releasing(folder), being_started(folder, record, lock_fd, self.taken, **notes):
            self.keep_target(folder)
            # Queued by this program and not by the supervisor, so that runs start in the order of submission, however long
            # each supervisor takes to load.
            self.target.enqueue(self.job, folder.path)
            self.target.start_supervisor(folder.path, lock_fd, library_dir(self.workspace_dir), sys.executable)

    def keep_target(self, folder: RunFolder) -> None:
        """Copy the target's settings into the run: its supervisor may start hours later, when these have changed."""
        if self.described.kind != configured.LOCAL:
            configured.keep_copy(folder.path, self.described)

    @contextlib.contextmanager
    def releasing(self, *folders: RunFolder) -> Iterator[None]:
        """Give back queue positions and resources of runs that fail to start."""
        try:
            yield
        except PacelineError:
            for folder in folders:
                self.target.release(folder.path)
            raise


def submit(
    job: Job,
    source: SourceCopy,
    workspace_dir: Path,
    experiment: str,
    *,
    tags: Mapping[str, object] | None = None,
    parent_run_id: str | None = None,
    trial: Mapping[str, object] | None = None,
    step: Mapping[str, object] | None = None,
    progress: snapshot.Progress | None = None,
    display_name: str | None = None,
    values: Mapping[str, str] | None = None,
    leave_out: Sequence[Path] = (),
    run_id: str | None = None,
    warnings: Sequence[str] = (),
    checkpoints: Path | None = None,
) -> RunFolder:
    """Start a run of `job` and return its folder at once. The run continues when this program ends.

    `trial` and `step` are entries of the record of a sweep's or a pipeline's child, `warnings` its first warnings. `values` of
    secrets replace those at their places, files in `leave_out` stay out of the snapshot, and the folder `checkpoints` is copied
    as the run's own checkpoints.

    Raises:
        UserError: The run is known to fail before any process starts.
        TargetError: The supervisor could not be started.
    """
    check_experiment_name(experiment)
    tags_and_properties.check_display_name(display_name)
    # First, because a supervisor may be loading already for the folder of this id (`paceline.cli.quick`).
    runs_dir, run_id = workspace_dir / "runs", run_id or new_run_id(experiment)
    folder = RunFolder(runs_dir / run_id)
    # Before anything is made or copied: a missing value ends the submission.
    job, values = unrecorded(job, values or {})
    secrets = values_of(job, values)
    job, left_out = _without_sdk(job)
    for text in left_out:
        _log.warning("%s", text)
    described = configured.read(workspace_dir, job.compute_target)
    target = described.make()
    # The supervisor's interpreter and imports take about as long as the checks and the copy, so they run side by side.
    if isinstance(target, EarlyStart):
        target.load_supervisor(folder.path, library_dir(workspace_dir), sys.executable)
    # Ctrl-C too: a supervisor without a run ends with this program, but a notebook's program may live for days.
    try:
        check_on(job, workspace_dir, described, target)
        submission = _Submission(
            job=job,
            source=source,
            workspace_dir=workspace_dir,
            described=described,
            target=target,
            taken=take_snapshot(job, source, workspace_dir, progress, leave_out),
        )
        record = first_record(
            job,
            source,
            submission.taken,
            run_id=run_id,
            experiment=experiment,
            parent_run_id=parent_run_id,
            trial=trial,
            step=step,
            warnings=(*warnings, *left_out),
        )
        # From here on readers see the run, with this process as its owner.
        lock_fd = store.create(runs_dir, record, secrets, checkpoints)
    except BaseException:
        target.release(folder.path)
        raise
    submission.start(folder, record, lock_fd, tags=tags, display_name=display_name)
    return folder


def submit_alike(
    trials: Sequence[tuple[str, Job, Mapping[str, object]]],
    source: SourceCopy,
    workspace_dir: Path,
    experiment: str,
    *,
    parent_run_id: str,
    values: Mapping[str, str],
    at_once: int,
) -> list[RunFolder]:
    """Start runs whose jobs differ only in arguments, by one call of the engine (`targets.base.Alike`).

    `trials` has the run id, the job and the record's entry of each. At most `at_once` of them run at a time.

    Raises:
        UserError, TargetError: As for `submit`. No run has started then.
    """
    job, left_out = _without_sdk(trials[0][1])
    described = configured.read(workspace_dir, job.compute_target)
    target = described.make()
    assert isinstance(target, Alike), "checked when the sweep is submitted"
    check_on(job, workspace_dir, described, target)
    submission = _Submission(
        job=job,
        source=source,
        workspace_dir=workspace_dir,
        described=described,
        target=target,
        taken=take_snapshot(job, source, workspace_dir),
    )
    secrets = values_of(job, values)
    folders = [RunFolder(workspace_dir / "runs" / run_id) for run_id, _, _ in trials]
    with submission.releasing(*folders), contextlib.ExitStack() as starting:
        for folder, (run_id, its_job, trial) in zip(folders, trials, strict=True):
            record = first_record(
                dataclasses.replace(its_job, environment=job.environment),
                source,
                submission.taken,
                run_id=run_id,
                experiment=experiment,
                parent_run_id=parent_run_id,
                trial=trial,
                warnings=left_out,
            )
            lock_fd = store.create(workspace_dir / "runs", record, secrets)
            starting.enter_context(being_started(folder, record, lock_fd, submission.taken))
            submission.keep_target(folder)
        target.start_supervisors(
            job, [folder.path for folder in folders], library_dir(workspace_dir), sys.executable, at_once
        )
    return folders


def submit_again(folder: RunFolder, values: Mapping[str, str]) -> None:
    """Start a run whose submission was cut off before anything of it ran. `values` are as for `submit`.

    Raises:
        TargetError: The run can't be started now either.
    """
    lock_fd = locks.take(folder.lock)
    if lock_fd is None:
        return  # another process starts it
    workspace_dir, record = folder.path.parents[1], store.stored(folder)
    job = record.job
    assert job is not None, "it was submitted"
    described = configured.read(workspace_dir, job.compute_target)
    for path in (folder.engine, folder.gone, folder.snapshot, folder.linked):
        path.unlink(missing_ok=True)
    if values:
        write_json(folder.secrets, dict(values), mode=PRIVATE)
    record = dataclasses.replace(
        record, status=states.NOT_STARTED, failure=None, exit_code=None, ended_utc=None, owner=store.owner()
    )
    store.write(folder, record)
    source = SourceCopy(directory=Path(record.source_directory or "."), snapshot_id=record.snapshot_id)
    submission = _Submission(
        job=job,
        source=source,
        workspace_dir=workspace_dir,
        described=described,
        target=described.make(),
        taken=take_snapshot(job, source, workspace_dir),
    )
    submission.start(folder, record, lock_fd)


def _without_sdk(job: Job) -> tuple[Job, tuple[str, ...]]:
    """Return the job without packages of Azure's SDK in its environment, and a sentence for each of them."""
    environment, left_out = without_sdk_packages(job.environment)
    return (dataclasses.replace(job, environment=environment) if left_out else job), tuple(left_out)


def first_record(
    job: Job,
    source: SourceCopy,
    taken: snapshot.Snapshot,
    *,
    run_id: str,
    experiment: str,
    parent_run_id: str | None,
    trial: Mapping[str, object] | None = None,
    step: Mapping[str, object] | None = None,
    warnings: Sequence[str] = (),
    kind: str = "script",
    sweep: Mapping[str, object] | None = None,
) -> RunRecord:
    """Return the first record of a new run. `sweep` is the search space of a run of kind "sweep"."""
    return RunRecord(
        run_id=run_id,
        experiment=experiment,
        kind=kind,
        parent_run_id=parent_run_id,
        trial=trial,
        step=step,
        created_utc=utc_now(),
        submitted_by=user_name(),
        target=job.compute_target,
        source_directory=str(source.directory),
        snapshot_id=taken.id,
        # A rerun has the state of the first run: the source folder may have changed since, or be gone.
        git=source.git or snapshot.git_state(source.directory),
        job=job,
        sweep=sweep,
        owner=store.owner(),
        warnings=tuple(warnings),
    )


@contextlib.contextmanager
def being_started(
    folder: RunFolder,
    record: RunRecord,
    lock_fd: int,
    taken: snapshot.Snapshot,
    *,
    tags: Mapping[str, object] | None = None,
    display_name: str | None = None,
) -> Iterator[None]:
    """Give a new run its snapshot and notes, then start its owner in the body, and release its lock.

    Raises:
        TargetError: No process could be started. The run is Failed then, as with any other error of Paceline's.
    """
    try:
        # Relative, so that it survives a move of the workspace.
        folder.snapshot.symlink_to(os.path.relpath(taken.path, folder.path))
        if taken.not_copied:
            linked.write(folder.linked, taken.not_copied)
        if tags:
            tags_and_properties.set_tags(folder.notes, tags)
        if display_name:
            tags_and_properties.set_name(folder.notes, "display_name", display_name)
        yield
    # Not on Ctrl-C: the next reader of the run finds it without an owner, and records why it failed.
    except (OSError, PacelineError) as error:
        report = FailureReport(cause="not_started", message=f"The run could not be started: {error}.")
        store.change(folder, record, states.FAILED, failure=report, exit_code=1, ended_utc=utc_now())
        if isinstance(error, PacelineError):
            raise
        raise TargetError(f"run {record.run_id} could not be started on {record.target!r}: {error}.") from error
    finally:
        os.close(lock_fd)  # the supervisor or the controller holds it now
