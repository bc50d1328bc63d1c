"""Submit a sweep: check it, write its record and snapshot, and start its controller."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import SweepError
from paceline.job.entry import entry_file
from paceline.job.job import Job
from paceline.job.notify import check_no_conditions
from paceline.runs import controllers, read, store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_experiment_name, new_run_id
from paceline.runs.record import StepEntry, utc_now
from paceline.snapshot import Progress
from paceline.submit import (
    NewRun,
    SourceCopy,
    being_started,
    check,
    check_source,
    first_record,
    places_of,
    take_snapshot,
    unrecorded,
    values_of,
)
from paceline.sweeps.argparse_check import certain_way, check_script, list_way
from paceline.sweeps.points import ARGUMENTS, EQUALS, REPEATED, WORDS, is_of_switch, job_of
from paceline.sweeps.policies.pausing import budget
from paceline.sweeps.results import MORE, more_locked, requested
from paceline.sweeps.samplers.samplers import Proposals, check_own
from paceline.sweeps.space import Space, argument
from paceline.sweeps.spec import MOST_TRIALS, SweepSpec
from paceline.sweeps.trial_runs import count
from paceline.sweeps.warm_start import KnownResult, as_trials, keep, known_results
from paceline.system import lock_holder, locks
from paceline.system.files import PRIVATE, write_json
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
    step: StepEntry | None = None,
) -> RunFolder:
    """Start a sweep of `job` and return its folder without waiting.

    `spec` describes the sweep; `paceline.submit.submit` describes the other arguments.

    Raises:
        UserError: Checks show that the sweep would fail.
        TargetError: The sweep's controller could not be started.
    """
    job, values = unrecorded(job, values or {})
    known = checked(job, spec, source, workspace_dir, experiment, values)
    taken = take_snapshot(job, source, workspace_dir, progress, leave_out)
    run = NewRun(
        run_id=run_id or new_run_id(experiment),
        job=job,
        parent_run_id=parent_run_id,
        step=step,
        warnings=tuple(warnings),
    )
    record = first_record(run, source, taken, experiment, kind="sweep", sweep=known.spec.to_json())
    # Lock the folder before it is visible, because readers consider a run without a lock abandoned.
    lock_fd = store.create(workspace_dir / "runs", record, known.secrets)
    folder = RunFolder(workspace_dir / "runs" / record.run_id)
    with being_started(folder, record, lock_fd, taken, tags=tags, display_name=display_name):
        keep(folder, known.results)
        if spec.controller is not None:
            # Keep a copy of the target's settings for readers of the sweep, as for a run whose supervisor is in an engine's job.
            configured.keep_copy(folder.path, known.described)
        controllers.start(folder, lock_fd)
    return folder


@dataclass(frozen=True, kw_only=True)
class CheckedSweep:
    """A sweep that has passed all checks and may be submitted.

    Attributes:
        spec: The sweep's spec, with the switches that the script declares.
        secrets: {name: value} of the job's secrets and webhook addresses.
        results: Results of former sweeps, for a warm start.
    """

    spec: SweepSpec
    secrets: dict[str, str]
    described: configured.Configured
    results: list[KnownResult]


def checked(
    job: Job,
    spec: SweepSpec,
    source: SourceCopy,
    workspace_dir: Path,
    experiment: str,
    values: Mapping[str, str] | None = None,
) -> CheckedSweep:
    """Check a sweep, and return the data for its submission. Create nothing.

    Raises:
        UserError: Checks show that the sweep would fail.
    """
    check_experiment_name(experiment)
    secrets = values_of(job, values or {})
    check(job, workspace_dir)
    check_no_conditions(job.notify_on, "sweep")
    described = configured.read(workspace_dir, job.compute_target)
    _check_target(job, spec, described)
    taken = source.snapshot_id is not None
    directory = workspace_dir / "snapshots" / str(source.snapshot_id) if taken else source.directory
    if not taken:
        check_source(job, directory, workspace_dir)
    spec = check_points(job, spec, directory)
    if ":" in spec.sampler:
        check_own(spec.sampler, directory)
    results = known_results(spec, workspace_dir / "runs")
    if results and ":" not in spec.sampler:
        Proposals(spec, directory, as_trials(results))  # raises an error if the sampler needs more results
    return CheckedSweep(spec=spec, secrets=secrets, described=described, results=results)


def check_points(job: Job, spec: SweepSpec, directory: Path) -> SweepSpec:
    """Raise an error unless the job and its script can take the sweep's values.

    Return the spec, extended by the switches that the script declares.

    `directory`: The job's source.

    Raises:
        UserError: The job or its script cannot take the values; the message says why.
    """
    spec = _with_way(spec, job, directory)
    if spec.pass_as in (ARGUMENTS, WORDS, REPEATED):
        for name, value in budget(spec.stop).items():
            try:
                check_script(Space({name: value}), job, directory)
            except SweepError as error:
                raise SweepError(f"budget={name!r}: {error}") from None
        others = [argument(name) for name in (*budget(spec.stop), *(["--resume-from"] if spec.resumed else ()))]
        switches = check_script(spec.space, job, directory, spec.switches, others)
        spec = dataclasses.replace(spec, switches=switches)
    # Check the job with a point from the middle of the space.
    first = spec.space.draw(lambda dimension: dimension.expression.raw_at(0.5))
    job_of(job, spec.space.values(first), spec.pass_as, directory, spec.switches)
    return spec


def _with_way(spec: SweepSpec, job: Job, directory: Path) -> SweepSpec:
    """Return the spec with `pass_as` set as the script requires, if detectable."""
    script = entry_file(job, directory) if job.is_python and spec.pass_as == ARGUMENTS else None
    if script is None:
        return spec
    known_way = certain_way(directory / script)
    if known_way in (None, EQUALS) and (of_lists := list_way(spec.space, directory / script)) is not None:
        return dataclasses.replace(spec, pass_as=of_lists)
    if known_way is None or (spec.switches and known_way not in (EQUALS, WORDS)):
        return spec
    if known_way != WORDS or spec.switches:
        return dataclasses.replace(spec, pass_as=known_way)
    # For tyro, check that each switch is declared as `--model.amp` and `--model.no-amp`.
    names = [argument(dimension.name) for dimension in spec.space.parameters if is_of_switch(dimension)]
    pairs = (
        f"{name}/{above}{dot}no-{last}" if dot else f"{name}/--no-{name[2:]}"
        for name, (above, dot, last) in ((name, name.rpartition(".")) for name in names)
    )
    return dataclasses.replace(spec, pass_as=known_way, switches=tuple(dict.fromkeys(pairs)))


def _check_target(job: Job, spec: SweepSpec, described: configured.Configured) -> None:
    target, named = described.make(), f"compute target {described.name!r} is of kind {described.kind}"
    if spec.array_size is not None:
        if not isinstance(target, Alike):
            raise SweepError(
                f"array_size={spec.array_size}: {named}, which takes trials one by one. Leave it out, or choose a target of "
                "kind slurm or kubernetes."
            )
        target.check_alike(job)
    if spec.controller is None:
        return
    if spec.controller != described.kind or not isinstance(target, Controlling):
        raise SweepError(
            f"controller={spec.controller!r}: {named}. The controller can be in the engine of the trials alone: choose a target "
            f"of kind {spec.controller}, or leave it out, and it is a process of this machine."
        )
    target.check_controller()


def more(folder: RunFolder, trials: int) -> None:
    """Request more trials of a sweep that runs or has ended.

    An ended sweep continues with these trials, and its limits start to count from zero (`count_anew`).

    Raises:
        SweepError: The run is no sweep, or the number is not valid.
    """
    record = read.record(folder)
    if record.sweep is None:
        raise SweepError(f"run {folder.run_id} is not a sweep; its kind is {record.kind}.")
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise SweepError(f"trials={trials!r} is not an integer of 1 or more.")
    # Write the request before trying the lock. A controller that is about to end, but still holds the lock, then continues.
    with more_locked(folder):
        in_all = requested(folder) + trials
        there = count(folder) if record.is_terminal else SweepSpec.from_json(record.sweep).trials
        if (total := there + in_all) > MOST_TRIALS:
            raise SweepError(f"trials={trials}: {total} in all are more than {MOST_TRIALS}, which a sweep may have.")
        write_json(folder.path / MORE, {"trials": in_all})
    # Read the record a second time: a controller that ended before the request was written has not seen the request.
    if not (record := read.record(folder)).is_terminal:
        return
    # Wait a moment for the lock: the controller releases it after it has written the end of the sweep.
    deadline = time.monotonic() + _LOCK_S
    while (fd := locks.take(folder.lock)) is None:
        if not (folder.path / MORE).exists():
            return  # the running controller has seen the request
        if time.monotonic() > deadline:
            raise SweepError(f"another process locks sweep {folder.run_id}: {lock_holder.holder(folder.lock)}.")
        time.sleep(0.05)
    try:
        # Remove the cancel request of a canceled sweep, which would end the new controller.
        folder.cancel_request.unlink(missing_ok=True)
        # Store the secrets again, because they were deleted when the sweep ended.
        if record.job is not None and places_of(record.job):
            write_json(folder.secrets, values_of(record.job, {}), mode=PRIVATE)
        count_anew(folder)
        controllers.reopen(folder, store.stored(folder))
        controllers.start(folder, fd)
    finally:
        os.close(fd)


def count_anew(folder: RunFolder) -> None:
    """Add the requested trials to an ended sweep, and restart its limits.

    Earlier time, failed trials and trials without a metric no longer count. The caller holds the sweep's lock.
    """
    record, there = store.stored(folder), count(folder)
    spec = SweepSpec.from_json(record.sweep or {})
    with more_locked(folder):
        trials = there + requested(folder)
        spec = dataclasses.replace(spec, trials=trials, counted_from=there, counted_utc=utc_now())
        store.write(folder, dataclasses.replace(record, sweep=spec.to_json()))
        (folder.path / MORE).unlink(missing_ok=True)
