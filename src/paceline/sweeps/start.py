"""A sweep's start: its record, its snapshot, and its controller."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import SweepError
from paceline.job.job import Job
from paceline.runs import controllers, read, store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import new_run_id
from paceline.runs.record import RunRecord, user_name, utc_now
from paceline.snapshot import Progress, git_state
from paceline.submit import SourceCopy, being_started, check, take_snapshot, values_of, warn_of_secrets
from paceline.sweeps.fit.fit import check_script
from paceline.sweeps.points import ARGUMENTS, job_of
from paceline.sweeps.policies.pausing import budget
from paceline.sweeps.prior import as_trials, keep, known_results
from paceline.sweeps.proposals import Proposals
from paceline.sweeps.results import MORE
from paceline.sweeps.space import Space
from paceline.sweeps.spec import MOST_TRIALS, SweepSpec
from paceline.system import locks
from paceline.system.files import PRIVATE, read_json, write_json
from paceline.targets import configured
from paceline.targets.base import Alike, Controlling

_LOCK_S = 10.0


def submit_sweep(
    job: Job,
    spec: SweepSpec,
    source: SourceCopy,
    workspace_dir: Path,
    experiment: str,
    *,
    tags: Mapping[str, object] | None = None,
    progress: Progress | None = None,
    display_name: str | None = None,
    values: Mapping[str, str] | None = None,
    leave_out: Sequence[Path] = (),
    warnings: Sequence[str] = (),
    run_id: str | None = None,
    parent_run_id: str | None = None,
    step: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Start a sweep of `job` and return its folder at once; it goes on when this program ends.

    values, leave_out, warnings, run_id, parent_run_id, step: as for `paceline.submit.submit`.

    Raises:
        UserError: anything that can be known to be wrong before a process starts.
        TargetError: the controller could not be started.
    """
    secrets = values_of(job, values or {})
    warn_of_secrets(job)
    check(job, workspace_dir)
    described = configured.read(workspace_dir, job.compute_target)
    _check_target(spec, described)
    if job.notify:
        raise SweepError(
            f"notify={list(job.notify)!r} of a sweep: each of its trials would tell of its end. Leave it out, and let the shell "
            "tell of the sweep's: paceline sweep run ... && ./told.sh."
        )
    check_points(job, spec, source.directory)
    results = known_results(spec, workspace_dir / "runs")
    if results and ":" not in spec.sampler:
        Proposals(spec, source.directory, as_trials(results))  # the sampler itself says whether they are enough
    taken = take_snapshot(job, source, workspace_dir, progress, leave_out)
    record = RunRecord(
        run_id=run_id or new_run_id(experiment),
        experiment=experiment,
        kind="sweep",
        parent_run_id=parent_run_id,
        step=step,
        created_utc=utc_now(),
        submitted_by=user_name(),
        target=job.compute_target,
        source_directory=str(source.directory),
        snapshot_id=taken.id,
        git=git_state(source.directory),
        job=job,
        sweep=spec.to_json(),
        owner=store.owner(),
        warnings=tuple(warnings),
    )
    # The lock is held from the folder's first moment: without it a reader would take the sweep for deserted.
    lock_fd = store.create(workspace_dir / "runs", record, secrets)
    folder = RunFolder(workspace_dir / "runs" / record.run_id)
    with being_started(folder, record, lock_fd, taken, tags=tags, display_name=display_name):
        keep(folder, results)
        if spec.controller is not None:
            # By this copy the sweep is read from then on, as a run of the engine's is.
            configured.keep_copy(folder.path, described)
        controllers.start(folder, lock_fd)
    return folder


def check_points(job: Job, spec: SweepSpec, directory: Path) -> None:
    """Refuse a sweep whose values can be known to be nothing for the job or for its script. directory: the job's source.

    Raises:
        UserError: what is wrong.
    """
    if spec.pass_as == ARGUMENTS:
        check_script(spec.space, job, directory)
        for name, value in budget(spec.stop).items():
            try:
                check_script(Space({name: value}), job, directory)
            except SweepError as error:
                raise SweepError(f"budget={name!r}: {error}") from None
    # A point from its middle shows whether the job takes what it will be given.
    first = spec.space.draw(lambda dimension: dimension.expression.raw_at(0.5))
    job_of(job, spec.space.values(first), spec.pass_as, directory)


def _check_target(spec: SweepSpec, described: configured.Configured) -> None:
    target, named = described.make(), f"compute target {described.name!r} is of kind {described.kind}"
    if spec.array_size is not None and not isinstance(target, Alike):
        raise SweepError(
            f"array_size={spec.array_size}: {named}, which takes trials one by one; job arrays are Slurm's. Leave it out, or "
            "choose a target of kind slurm."
        )
    if spec.controller is None:
        return
    if spec.controller != described.kind or not isinstance(target, Controlling):
        raise SweepError(
            f"controller={spec.controller!r}: {named}. The controller can be in the engine of the trials alone: choose a target "
            f"of kind {spec.controller}, or leave it out, and it is a process of this machine."
        )
    target.check_controller()


def more(folder: RunFolder, trials: int) -> None:
    """Ask for more trials of a sweep that runs, or start one again that has ended.

    Raises:
        SweepError: it is no sweep, or the number is none.
    """
    record = read.record(folder)
    if record.sweep is None:
        raise SweepError(f"run {folder.run_id} is no sweep; its kind is {record.kind}.")
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise SweepError(f"trials={trials!r} is no integer of 1 or more.")
    # Before the look at the lock: a controller that is about to end finds the request and goes on by itself.
    # What was asked for a moment before, and not yet seen, counts as well.
    asked = (read_json(folder.path / MORE) or {}).get("trials", 0) + trials
    if (total := record.sweep["trials"] + asked) > MOST_TRIALS:
        raise SweepError(f"trials={trials}: {total} in all are more than {MOST_TRIALS}, which a sweep may have.")
    write_json(folder.path / MORE, {"trials": asked})
    if not record.is_terminal:
        return
    # A controller that has written the end lets go of the lock a moment later.
    deadline = time.monotonic() + _LOCK_S
    while (fd := locks.take(folder.lock)) is None:
        if not (folder.path / MORE).exists():
            return  # it has seen the request itself
        if time.monotonic() > deadline:
            raise SweepError(f"somebody else holds the lock of sweep {folder.run_id}: {locks.holder(folder.lock)}.")
        time.sleep(0.05)
    try:
        # Of a sweep that was canceled: the request is still there, and would end the new controller at once.
        folder.cancel_request.unlink(missing_ok=True)
        # The values went when the sweep ended; new trials need them again.
        if record.job is not None and record.job.secrets:
            write_json(folder.secrets, values_of(record.job, {}), mode=PRIVATE)
        controllers.reopen(folder, record)
        controllers.start(folder, fd)
    finally:
        os.close(fd)
