"""Submit runs: a single run, many runs of one job, or again a run whose submission was interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline import snapshot
from paceline.environments.sdk_packages import without_sdk_packages
from paceline.errors import PacelineError, TargetError
from paceline.job.job import Job
from paceline.runs import states, store, tags_and_properties
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_experiment_name, new_run_id
from paceline.runs.record import RunRecord, StepEntry, TrialEntry, user_name, utc_now
from paceline.submit.checks import check_on
from paceline.submit.source import SourceCopy, take_snapshot, use_snapshot
from paceline.submit.values import unrecorded, values_of
from paceline.system import linked, locks
from paceline.system.detached_process import library_dir
from paceline.system.files import PRIVATE, write_json
from paceline.targets import Target, configured
from paceline.targets.base import Alike, EarlyStart

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A run to start.

    Attributes:
        secrets: Values of the job's secrets by name, from `values_of`.
        parent_run_id, trial, step, warnings: Fields of the run's record.
        checkpoints: A folder to copy as the run's own checkpoints.
        fill: Function that writes more files into the run's folder, before other processes can see the folder.
    """

    run_id: str
    job: Job
    secrets: Mapping[str, str] = field(default_factory=dict)
    parent_run_id: str | None = None
    trial: TrialEntry | None = None
    step: StepEntry | None = None
    warnings: tuple[str, ...] = ()
    checkpoints: Path | None = None
    tags: Mapping[str, object] | None = None
    display_name: str | None = None
    fill: Callable[[RunFolder], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A checked job with its target and copied source, for one run or many.

    Attributes:
        warnings: Warnings that each run's record has from the start.
    """

    job: Job
    source: SourceCopy
    workspace_dir: Path
    experiment: str
    described: configured.Configured
    target: Target
    taken: snapshot.Snapshot
    warnings: tuple[str, ...] = ()

    def check_again(self, job: Job) -> None:
        """Raise UserError if the target can't run `job`, or the code's snapshot is gone."""
        self.target.check(job)
        use_snapshot(self.taken.path)

    def start(self, run: NewRun) -> RunFolder:
        """Start one run, with its own arguments, variables and inputs. Return its folder."""
        folder = RunFolder(self.workspace_dir / "runs" / run.run_id)
        try:
            record, lock_fd = self._create(folder, run)
        except BaseException:
            self.target.release(folder.path)
            raise
        self.start_supervisor(folder, record, lock_fd, run)
        return folder

    def start_alike(self, runs: Sequence[NewRun], at_once: int) -> None:
        """Start runs by one request, such as a Slurm job array. At most `at_once` run together.

        Raises:
            UserError, TargetError: A run could not be created or started. Then no run has started.
        """
        target, folders = self.target, [RunFolder(self.workspace_dir / "runs" / run.run_id) for run in runs]
        assert isinstance(target, Alike), "checked when the sweep is submitted"
        with self._releasing(*folders), contextlib.ExitStack() as starting:
            for folder, run in zip(folders, runs, strict=True):
                starting.enter_context(being_started(folder, *self._create(folder, run), self.taken))
                self._keep_target(folder)
            library = library_dir(self.workspace_dir)
            target.start_supervisors(self.job, [folder.path for folder in folders], library, sys.executable, at_once)

    def start_supervisor(self, folder: RunFolder, record: RunRecord, lock_fd: int, run: NewRun | None = None) -> None:
        """Start the supervisor of a run whose folder exists."""
        tags, name = (run.tags, run.display_name) if run is not None else (None, None)
        with self._releasing(folder), being_started(folder, record, lock_fd, self.taken, tags=tags, display_name=name):
            self._keep_target(folder)
            # This program puts the run in the queue. If each run's supervisor did so, runs would start in the order in which
            # their supervisors have loaded, not in the order of submission.
            self.target.enqueue(record.job or self.job, folder.path)
            self.target.start_supervisor(folder.path, lock_fd, library_dir(self.workspace_dir), sys.executable)

    def _create(self, folder: RunFolder, run: NewRun) -> tuple[RunRecord, int]:
        """Create a run's folder. Return its record and the descriptor of its lock."""
        job = run.job
        if job.environment != self.job.environment:
            job = dataclasses.replace(job, environment=self.job.environment)
        run = dataclasses.replace(run, job=job, warnings=(*run.warnings, *self.warnings))
        record = first_record(run, self.source, self.taken, self.experiment)
        return record, store.create(folder.path.parent, record, run.secrets, run.checkpoints, run.fill)

    def _keep_target(self, folder: RunFolder) -> None:
        """Copy the target's settings into the run's folder."""
        if self.described.kind != configured.LOCAL:
            configured.keep_copy(folder.path, self.described)

    @contextlib.contextmanager
    def _releasing(self, *folders: RunFolder) -> Iterator[None]:
        """Release queue positions and resources of the runs if the block raises a PacelineError."""
        try:
            yield
        except PacelineError:
            for folder in folders:
                self.target.release(folder.path)
            raise


def prepare(
    job: Job,
    source: SourceCopy,
    workspace_dir: Path,
    experiment: str,
    *,
    progress: snapshot.Progress | None = None,
    leave_out: Sequence[Path] = (),
    first: RunFolder | None = None,
    is_checked: bool = False,
) -> Submission:
    """Check a job and copy its source, for one run or many.

    `first` is the folder of a run that the caller starts next. To save time, its supervisor process already loads modules
    while this function runs. With `is_checked`, skip the checks, because the job has passed them already.

    Raises:
        UserError: The checks show that the runs would fail.
    """
    environment, left_out = without_sdk_packages(job.environment)
    for text in left_out:
        _log.warning("%s", text)
    job = dataclasses.replace(job, environment=environment) if left_out else job
    described = configured.read(workspace_dir, job.compute_target)
    target = described.make()
    # Start the supervisor now: its start takes about as long as the checks and the copy, so both run at the same time.
    if first is not None and isinstance(target, EarlyStart):
        target.load_supervisor(first.path, library_dir(workspace_dir), sys.executable)
    # Handle Ctrl-C too: a supervisor without a run ends only with this program, and a notebook may live for days.
    try:
        if not is_checked:
            check_on(job, workspace_dir, described, target)
        taken = take_snapshot(job, source, workspace_dir, progress, leave_out)
    except BaseException:
        if first is not None:
            target.release(first.path)
        raise
    return Submission(
        job=job,
        source=source,
        workspace_dir=workspace_dir,
        experiment=experiment,
        described=described,
        target=target,
        taken=taken,
        warnings=tuple(left_out),
    )


def submit(
    job: Job,
    source: SourceCopy,
    workspace_dir: Path,
    experiment: str,
    *,
    tags: Mapping[str, object] | None = None,
    parent_run_id: str | None = None,
    step: StepEntry | None = None,
    progress: snapshot.Progress | None = None,
    display_name: str | None = None,
    values: Mapping[str, str] | None = None,
    leave_out: Sequence[Path] = (),
    run_id: str | None = None,
    warnings: Sequence[str] = (),
    checkpoints: Path | None = None,
    fill: Callable[[RunFolder], None] | None = None,
) -> RunFolder:
    """Start a run of `job`, and return the run's folder.

    `step` describes a pipeline step in the run's record. `warnings` are in the record from the start. `values` has
    values of the job's secrets by name; other secrets are read from the sources that the job names. Files in `leave_out` are not
    copied into the snapshot. `checkpoints` is a folder to copy as the run's own. `fill` writes more files into the run's folder.

    Raises:
        UserError: Checks before the start show that the run would fail.
        TargetError: The supervisor could not be started.
    """
    check_experiment_name(experiment)
    tags_and_properties.check_display_name(display_name)
    # Read the secrets' values before anything is made or copied, because a missing value ends the submission.
    job, values = unrecorded(job, values or {})
    run = NewRun(
        # `paceline.cli.quick` may have chosen this id, and started a supervisor that waits for this run.
        run_id=run_id or new_run_id(experiment),
        job=job,
        secrets=values_of(job, values),
        parent_run_id=parent_run_id,
        step=step,
        warnings=tuple(warnings),
        checkpoints=checkpoints,
        tags=tags,
        display_name=display_name,
        fill=fill,
    )
    first = RunFolder(workspace_dir / "runs" / run.run_id)
    submission = prepare(job, source, workspace_dir, experiment, progress=progress, leave_out=leave_out, first=first)
    return submission.start(run)


def submit_again(folder: RunFolder, values: Mapping[str, str]) -> None:
    """Start a run whose submission was interrupted. `values`: its secrets, by name.

    Raises:
        TargetError: The run can't be started now either.
    """
    lock_fd = locks.take(folder.lock)
    if lock_fd is None:
        return  # another process is starting the run
    record = store.stored(folder)
    job = record.job
    assert job is not None, "it was submitted"
    for path in (folder.engine, folder.gone, folder.snapshot, folder.linked):
        path.unlink(missing_ok=True)
    if values:
        write_json(folder.secrets, dict(values), mode=PRIVATE)
    record = dataclasses.replace(
        record, status=states.NOT_STARTED, failure=None, exit_code=None, ended_utc=None, owner=store.owner()
    )
    store.write(folder, record)
    source = SourceCopy(directory=Path(record.source_directory or "."), snapshot_id=record.snapshot_id)
    submission = prepare(job, source, folder.path.parents[1], record.experiment, is_checked=True)
    submission.start_supervisor(folder, record, lock_fd)


def first_record(
    run: NewRun,
    source: SourceCopy,
    taken: snapshot.Snapshot,
    experiment: str,
    *,
    kind: str = "script",
    sweep: Mapping[str, object] | None = None,
) -> RunRecord:
    """Return the first record of a new run. `sweep` is a sweep's search space."""
    return RunRecord(
        run_id=run.run_id,
        experiment=experiment,
        kind=kind,
        parent_run_id=run.parent_run_id,
        trial=run.trial,
        step=run.step,
        created_utc=utc_now(),
        submitted_by=user_name(),
        target=run.job.compute_target,
        source_directory=str(source.directory),
        snapshot_id=taken.id,
        # A rerun uses the git state of the first run: the source folder may have changed since, or be gone.
        git=source.git or snapshot.git_state(source.directory),
        job=run.job,
        sweep=sweep,
        owner=store.owner(),
        warnings=run.warnings,
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
    """Fill a new run's folder (snapshot, tags, name). The caller's `with` block starts the run.

    After the block, close this process's descriptor of the run's lock.

    Raises:
        TargetError: The block could not start the process (OSError). The run is then marked Failed.
    """
    try:
        # The link is relative, so that it survives a move of the workspace.
        folder.snapshot.symlink_to(os.path.relpath(taken.path, folder.path))
        if taken.not_copied:
            linked.write(folder.linked, taken.not_copied)
        if tags:
            tags_and_properties.set_tags(folder.notes, tags)
        if display_name:
            tags_and_properties.set_name(folder.notes, "display_name", display_name)
        yield
    # Don't catch Ctrl-C: the next reader of the run finds that the run has no owner, and records the failure.
    except (OSError, PacelineError) as error:
        report = FailureReport(cause="not_started", message=f"The run could not be started: {error}.")
        store.change(folder, record, states.FAILED, failure=report, exit_code=1, ended_utc=utc_now())
        if isinstance(error, PacelineError):
            raise
        raise TargetError(f"run {record.run_id} could not be started on {record.target!r}: {error}.") from error
    finally:
        os.close(lock_fd)  # the supervisor or the controller holds the lock now
