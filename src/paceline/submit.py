"""The whole flow of a submission in one function."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline import snapshot
from paceline.environments import sdk_packages
from paceline.errors import DataError, EnvironmentSpecError, JobError, PacelineError, TargetError
from paceline.job.data_reference import DataReference, Source
from paceline.job.entry import entry_file
from paceline.job.environment import EnvironmentSpec
from paceline.job.job import Job
from paceline.job.notify import check_commands, key_of, place_of
from paceline.job.secret_values import looks_secret
from paceline.job.sizes import range_text
from paceline.launchers import get_launcher
from paceline.runs import states, store, tags_and_properties
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_experiment_name, new_run_id
from paceline.runs.record import RunRecord, user_name, utc_now
from paceline.snapshot.scan import scan
from paceline.system import linked, locks, processes
from paceline.system.detached_process import library_dir
from paceline.system.files import PRIVATE, write_json
from paceline.system.linked import NotCopied
from paceline.targets import Target, configured
from paceline.targets.base import Alike, EarlyStart

_log = logging.getLogger(__name__)

#: MAX_ARG_STRLEN of Linux, 32 pages: bytes of one argument or one NAME=VALUE, the closing NUL included.
_MOST_BYTES = 131_072


@dataclass(frozen=True, kw_only=True)
class SourceCopy:
    """What a run's code is: a folder, or a snapshot that is there already (a rerun's).

    link: folders in it, relative, with results of earlier runs that the run shall see. is_whole: it was made for this run and is
        removed, so all of it is copied.
    """

    directory: Path
    is_whole: bool = False
    link: frozenset[str] = frozenset()
    snapshot_id: str | None = None
    git: Mapping[str, object] = dataclasses.field(default_factory=dict)


def submit(
    job: Job,
    source: SourceCopy,
    workspace_dir: Path,
    experiment: str,
    *,
    tags: Mapping[str, object] | None = None,
    parent_run_id: str | None = None,
    trial: Mapping[str, Any] | None = None,
    step: Mapping[str, Any] | None = None,
    progress: snapshot.Progress | None = None,
    display_name: str | None = None,
    values: Mapping[str, str] | None = None,
    leave_out: Sequence[Path] = (),
    run_id: str | None = None,
    warnings: Sequence[str] = (),
    checkpoints: Path | None = None,
) -> RunFolder:
    """Start a run of `job` and return its folder at once; the run goes on when this program ends.

    trial, step: what the record says of a sweep's child, or of a pipeline's.
    values: of the job's secrets, in place of what lies at their places. leave_out: files that the snapshot is not to hold.
    run_id: of the new run; by default a fresh one. warnings: sentences that its record is to have from the start.
    checkpoints: a folder whose copy the run finds as its own checkpoints.

    Raises:
        UserError: anything that can be known to be wrong before a process starts.
        TargetError: the supervisor could not be started.
    """
    check_experiment_name(experiment)
    tags_and_properties.check_display_name(display_name)
    # The id comes first: by it a supervisor may be loading already for the folder that this run will have
    # (`paceline.cli.quick`).
    runs_dir, run_id = workspace_dir / "runs", run_id or new_run_id(experiment)
    # Before anything is made or copied, for a value that is missing ends the submission.
    job, values = unrecorded(job, values or {})
    secrets = values_of(job, values)
    environment, left_out = sdk_packages.without(job.environment)
    if left_out:
        job = dataclasses.replace(job, environment=environment)
        for text in left_out:
            _log.warning("%s", text)
    described = configured.read(workspace_dir, job.compute_target)
    target = described.make()
    early = isinstance(target, EarlyStart)
    # The supervisor's interpreter and imports take about as long as the checks and the copy below: they go on side by side.
    if isinstance(target, EarlyStart):
        target.load_supervisor(runs_dir / run_id, library_dir(workspace_dir), sys.executable)
    try:
        _check(job, workspace_dir, described, target)
        is_here = described.kind == configured.LOCAL
        taken = _taken(job, source, workspace_dir, progress, leave_out, is_here=is_here)
    # Ctrl-C too. A supervisor whose run will not come ends with this program at the latest, but a notebook's program may go on
    # for days.
    except BaseException:
        if early:
            target.release(runs_dir / run_id)
        raise
    record = first_record(
        job,
        source,
        taken,
        run_id=run_id,
        experiment=experiment,
        parent_run_id=parent_run_id,
        trial=trial,
        step=step,
        warnings=(*warnings, *left_out),
    )
    # From here on readers see the run, and this process as the one that looks after it.
    try:
        lock_fd = store.create(runs_dir, record, secrets, checkpoints)
    except BaseException:
        # A supervisor that was loaded early waits for this run.
        target.release(runs_dir / run_id)
        raise
    folder = RunFolder(runs_dir / run_id)
    try:
        with being_started(folder, record, lock_fd, taken, tags=tags, display_name=display_name):
            # The supervisor reads this copy, maybe hours later, when the workspace's own file of the target says something else.
            if described.kind != configured.LOCAL:
                configured.keep_copy(folder.path, described)
            # Queued by this program and not by the supervisor: so runs have their turn in the order of submission, however long
            # each supervisor takes to load.
            target.enqueue(job, folder.path)
            target.start_supervisor(folder.path, lock_fd, library_dir(workspace_dir), sys.executable)
    except PacelineError:
        target.release(folder.path)
        raise
    return folder


def submit_alike(
    trials: Sequence[tuple[str, Job, Mapping[str, Any]]],
    source: SourceCopy,
    workspace_dir: Path,
    experiment: str,
    *,
    parent_run_id: str,
    values: Mapping[str, str],
    at_once: int,
) -> list[RunFolder]:
    """Start runs whose jobs differ in arguments alone, by one call of an engine that takes many (`targets.base.Alike`).

    trials: run id, job and what the record says of it, each. at_once: how many may run at a time.

    Raises:
        UserError, TargetError: as for `submit`; none of them is started then.
    """
    job = trials[0][1]
    environment, left_out = sdk_packages.without(job.environment)
    described = configured.read(workspace_dir, job.compute_target)
    target = described.make()
    assert isinstance(target, Alike), "that is looked at when the sweep is submitted"
    _check(job, workspace_dir, described, target)
    taken = _taken(job, source, workspace_dir, None, (), is_here=False)
    secrets = values_of(job, values)
    folders: list[RunFolder] = []
    try:
        with contextlib.ExitStack() as starting:
            for run_id, its_job, trial in trials:
                record = first_record(
                    dataclasses.replace(its_job, environment=environment),
                    source,
                    taken,
                    run_id=run_id,
                    experiment=experiment,
                    parent_run_id=parent_run_id,
                    trial=trial,
                    warnings=left_out,
                )
                lock_fd = store.create(workspace_dir / "runs", record, secrets)
                folders.append(RunFolder(workspace_dir / "runs" / run_id))
                starting.enter_context(being_started(folders[-1], record, lock_fd, taken, tags=None, display_name=None))
                configured.keep_copy(folders[-1].path, described)
            target.start_supervisors(
                job, [folder.path for folder in folders], library_dir(workspace_dir), sys.executable, at_once
            )
    except PacelineError:
        for folder in folders:
            target.release(folder.path)
        raise
    return folders


def submit_again(folder: RunFolder, values: Mapping[str, str]) -> None:
    """Start a run whose submission was cut off, so that nothing of it has ever run. values: as for `submit`.

    Raises:
        TargetError: it can't be started now either.
    """
    lock_fd = locks.take(folder.lock)
    if lock_fd is None:
        return  # somebody else is at it
    workspace_dir, record = folder.path.parents[1], store.stored(folder)
    job = record.job
    assert job is not None, "it was submitted"
    described = configured.read(workspace_dir, job.compute_target)
    target = described.make()
    for path in (folder.engine, folder.gone, folder.snapshot, folder.linked):
        path.unlink(missing_ok=True)
    if values:
        write_json(folder.secrets, dict(values), mode=PRIVATE)
    record = dataclasses.replace(
        record, status=states.NOT_STARTED, failure=None, exit_code=None, ended_utc=None, owner=store.owner()
    )
    store.write(folder, record)
    source = SourceCopy(directory=Path(record.source_directory or "."), snapshot_id=record.snapshot_id)
    taken = _taken(job, source, workspace_dir, None, (), is_here=described.kind == configured.LOCAL)
    try:
        with being_started(folder, record, lock_fd, taken, tags=None, display_name=None):
            if described.kind != configured.LOCAL:
                configured.keep_copy(folder.path, described)
            target.enqueue(job, folder.path)
            target.start_supervisor(folder.path, lock_fd, library_dir(workspace_dir), sys.executable)
    except PacelineError:
        target.release(folder.path)
        raise


def first_record(
    job: Job,
    source: SourceCopy,
    taken: snapshot.Snapshot,
    *,
    run_id: str,
    experiment: str,
    parent_run_id: str | None,
    trial: Mapping[str, Any] | None = None,
    step: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
    kind: str = "script",
    sweep: Mapping[str, Any] | None = None,
) -> RunRecord:
    """The first record of a new run. sweep: what is tried, of one of kind "sweep"."""
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
        # A rerun has that of the first run: the source folder may have changed since, or be gone.
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
    tags: Mapping[str, object] | None,
    display_name: str | None,
) -> Iterator[None]:
    """Around the start of what looks after a new run: gives the run its snapshot and its notes, and lets go of its lock.

    Raises:
        TargetError: no process could be started. The run has Failed then, as with any error of Paceline's.
    """
    try:
        # Relative, so that it holds wherever the workspace is moved to or mounted.
        folder.snapshot.symlink_to(os.path.relpath(taken.path, folder.path))
        if taken.not_copied:
            linked.write(folder.linked, taken.not_copied)
        if tags:
            tags_and_properties.set_tags(folder.notes, tags)
        if display_name:
            tags_and_properties.set_name(folder.notes, "display_name", display_name)
        yield
    # Not for a Ctrl-C: that leaves a run that nobody looks after, and whoever reads it next writes down why it failed.
    except (OSError, PacelineError) as error:
        report = FailureReport(cause="not_started", message=f"The run could not be started: {error}.")
        store.change(folder, record, states.FAILED, failure=report, exit_code=1, ended_utc=utc_now())
        if isinstance(error, PacelineError):
            raise
        raise TargetError(f"run {record.run_id} could not be started on {record.target!r}: {error}.") from error
    finally:
        os.close(lock_fd)  # the run's supervisor, or the sweep's controller, holds it now


def check(job: Job, workspace_dir: Path) -> None:
    """Refuse what can be known to fail on this machine before anything starts.

    Raises:
        UserError: an unknown target, a launcher or a container engine that is not installed, too few GPUs, no such
            interpreter, an unknown datastore.
    """
    described = configured.read(workspace_dir, job.compute_target)
    _check(job, workspace_dir, described, described.make())


def _check(job: Job, workspace_dir: Path, described: configured.Configured, target: Target) -> None:
    is_here = described.kind == configured.LOCAL  # what other machines have, they say while the run prepares
    if job.gpu_share != 1 and not is_here:
        raise JobError(
            f"gpu_share={job.gpu_share:g}: compute target {job.compute_target!r} is of kind {described.kind}; runs share GPUs on "
            "this machine, target 'local', alone. Leave it out there."
        )
    if job.cores != 1 and not is_here:
        raise JobError(
            f"cores={job.cores}: compute target {job.compute_target!r} is of kind {described.kind}; runs reserve cores on this "
            "machine, target 'local', alone. Leave it out there."
        )
    if job.node_range is not None:
        from paceline.targets.base import Elastic

        if not isinstance(target, Elastic):
            raise JobError(
                f"node_count={range_text(*job.node_range)}: compute target {job.compute_target!r} is of kind {described.kind}, "
                "whose runs keep their size. Write one number, or choose another target."
            )
    if is_here:
        check_commands(job.notify)
    target.check(job)
    get_launcher(job.launcher).check(job)
    environment = job.environment
    if environment.docker_image is not None:
        from paceline.containers import check_image_name, check_shm_size, find_engine

        check_image_name(environment.docker_image)
        if environment.shm_size is not None:
            check_shm_size(environment.shm_size)
        if is_here:
            find_engine(to_start=False)
    # Elsewhere the interpreter is one of the nodes', and only they can say whether it is there.
    elif is_here and environment.python is not None:
        _check_python(environment.python)
    # Python leaves it empty where another program has embedded it.
    elif is_here and not sys.executable:
        raise JobError("this program does not know its own interpreter (sys.executable is empty). Set python= to one.")
    if environment.needs_build:
        _check_conda(environment)
    for reference in job.inputs:
        _check_datastores(reference, workspace_dir)


def in_places_of(job: Job, run_id: str, former: str) -> Job:
    """The job of a run of this id: in the places of its outputs the id stands where `former` stood."""

    def own(source: Source) -> Source:
        return dataclasses.replace(source, path=source.path.replace(former, run_id))

    inputs = [
        dataclasses.replace(one, sources=tuple(map(own, one.sources))) if one.is_output else one for one in job.inputs
    ]
    return dataclasses.replace(job, inputs=tuple(inputs))


def values_of(job: Job, given: Mapping[str, str]) -> dict[str, str]:
    """The values of the job's secrets: those given, else what lies at their places.

    Raises:
        JobError: some are nowhere to be had; all of them are named. Or an argument or a variable is too long for a process.
    """
    for number, word in enumerate(job.arguments, start=1):
        _check_length(f"arguments: number {number}", word)
    for name, value in job.environment_variables.items():
        _check_length(f"environment_variables: {name}", f"{name}={value}")
    places = places_of(job)
    if not places:
        return {}
    from paceline.data.stores.credentials import read_place

    # All are looked for before any is complained of, so that one message names everything that has to be set.
    values, missing = {name: given[name] for name in places if name in given}, []
    for name, place in places.items():
        if name not in values:
            try:
                values[name] = read_place(place)
            except DataError as error:
                missing.append(f"{name}: {error}")
    if missing:
        raise JobError(
            f"{'the values of secrets are' if len(missing) > 1 else 'the value of a secret is'} missing; nothing was started. "
            + " ".join(missing)
        )
    for name in job.secrets:
        _check_length(f"the secret {name}", f"{name}={values[name]}")
    if bad := [name for name, value in values.items() if "\0" in value]:
        raise JobError(f"the value of the secret {bad[0]} has a NUL character: no environment can carry one.")
    return values


def places_of(job: Job) -> dict[str, str]:
    """Return the place of each of the job's secrets and of each webhook's address, by the names that `values_of` has."""
    return {**job.secrets, **{key_of(one): where for one in job.notify if (where := place_of(one)) is not None}}


def _check_length(what: str, text: str) -> None:
    """Raise JobError unless Linux can hand this argument, or NAME=VALUE of a variable, to a process."""
    size = len(text.encode("utf-8", "surrogateescape"))
    if size >= _MOST_BYTES:
        raise JobError(
            f"{what} has {size:,} bytes, and Linux hands at most {_MOST_BYTES - 1:,} in one to a process. Put it into a file "
            "of the source folder, or into a datastore, and give the script its name."
        )


def unrecorded(job: Job, values: Mapping[str, str]) -> tuple[Job, dict[str, str]]:
    """Return the job with variables that look like secrets among its secrets, and the values with theirs.

    So no record holds such a value. A rerun reads it from the variable of the same name.
    """
    # Slurm's own names can't be secrets (`paceline.job.job`).
    found = {
        name: value
        for name, value in job.environment_variables.items()
        if looks_secret(name, value) and not name.startswith(("SLURM_", "SRUN_"))
    }
    # The estimator has put the environment's own among the job's variables.
    own = {name: v for name, v in job.environment.environment_variables.items() if not looks_secret(name, v)}
    if not found and len(own) == len(job.environment.environment_variables):
        return job, dict(values)
    for name in found:
        _log.warning(
            "%s looks like a secret: its value is not recorded. A rerun takes it from your shell: `export %s=...` before it.",
            *(name,) * 2,
        )
    job = dataclasses.replace(
        job,
        environment_variables={name: v for name, v in job.environment_variables.items() if name not in found},
        secrets={**job.secrets, **{name: f"env:{name}" for name in found}},
        environment=dataclasses.replace(job.environment, environment_variables=own),
    )
    return job, {**values, **found}


def check_source(job: Job, directory: Path, workspace_dir: Path) -> None:
    """Refuse a source folder that is none, or that has not what the job runs.

    Raises:
        UserError: one of these.
    """
    snapshot.check_folder(directory)
    is_here = configured.read(workspace_dir, job.compute_target).kind == configured.LOCAL
    entry_file(job, directory, is_here=is_here)


def not_copied(job: Job, source: SourceCopy, workspace_dir: Path, leave_out: Sequence[Path] = ()) -> list[NotCopied]:
    """Return the names of the source that a submission would not copy; nothing is copied.

    Raises:
        SnapshotError: the source can't be read.
    """
    _check_named(job, source, workspace_dir)
    opened = _opened(entry_file(job, source.directory), job.working_directory)
    none = workspace_dir / "snapshots" / ".scans" / "none"
    tree = scan(source.directory, none, workspace_dir, leave_out, opened, source.link.union(job.send))
    is_here = configured.read(workspace_dir, job.compute_target).kind == configured.LOCAL
    found = linked.measured(source.directory, tree.not_copied)
    return found if is_here else linked.with_sent(source.directory, found, job.send)


def take_snapshot(
    job: Job,
    source: SourceCopy,
    workspace_dir: Path,
    progress: snapshot.Progress | None = None,
    leave_out: Sequence[Path] = (),
    known: snapshot.Snapshot | None = None,
) -> snapshot.Snapshot:
    """The snapshot of the job's source, for several runs of it. leave_out: files that it is not to hold. known: one of the same
    folder, which was taken for another job.

    Raises:
        UserError: it can't be copied, or lacks the job's script.
    """
    is_here = configured.read(workspace_dir, job.compute_target).kind == configured.LOCAL
    return _taken(job, source, workspace_dir, progress, leave_out, is_here=is_here, known=known)


def _taken(
    job: Job,
    source: SourceCopy,
    workspace_dir: Path,
    progress: snapshot.Progress | None,
    leave_out: Sequence[Path],
    *,
    is_here: bool,
    known: snapshot.Snapshot | None = None,
) -> snapshot.Snapshot:
    snapshots_dir = workspace_dir / "snapshots"
    if source.snapshot_id is not None:
        path = snapshots_dir / source.snapshot_id
        if not path.is_dir():
            raise JobError(
                f"snapshot {source.snapshot_id} is no longer in {str(snapshots_dir)!r}. Submit the source again."
            )
        with contextlib.suppress(OSError):
            os.utime(path)  # in use from now on, before a record says so
        taken = snapshot.Snapshot(
            id=source.snapshot_id, path=path, file_count=0, size=0, is_new=False, files=frozenset()
        )
        return _with_not_copied(taken, job, source.directory, is_here=is_here)
    # Before the copy, which may take minutes: a script that is not there is said at once.
    script = entry_file(job, source.directory, is_here=is_here)
    _check_named(job, source, workspace_dir)
    opened = None if source.is_whole else _opened(script, job.working_directory)
    taken = known or snapshot.take(
        source.directory,
        snapshots_dir,
        workspace_dir,
        progress,
        leave_out,
        opened,
        source.link.union(job.send),
        source.is_whole,
    )
    if taken.not_copied and known is None:
        # For runs that take this snapshot later: reruns, a sweep's trials.
        linked.file_of(taken.path, source.directory).parent.mkdir(exist_ok=True)
        linked.write(linked.file_of(taken.path, source.directory), linked.measured(source.directory, taken.not_copied))
    if taken.not_copied:
        taken = _with_not_copied(taken, job, source.directory, is_here=is_here)
    if script is not None and script not in taken.files:
        raise JobError(
            f"entry_script {script!r} is left out of the snapshot by .amlignore or .gitignore in "
            f"{str(source.directory)!r}, or lies in a folder that never is in one (outputs, .git). Let the script in."
        )
    return taken


def _with_not_copied(taken: snapshot.Snapshot, job: Job, directory: Path, *, is_here: bool) -> snapshot.Snapshot:
    """Return the snapshot with the names that it has not, and what of them this job's nodes are sent."""
    found = linked.read(linked.file_of(taken.path, directory))
    return dataclasses.replace(
        taken, not_copied=tuple(found if is_here else linked.with_sent(directory, found, job.send))
    )


def _check_named(job: Job, source: SourceCopy, workspace_dir: Path) -> None:
    """Refuse what was named to be linked or sent beside the copy, and can't be.

    Raises:
        JobError: It is not there, is never sent, or the run's own outputs have its place.
    """
    directory = source.directory
    for option, path in (*(("link", path) for path in source.link), *(("send", path) for path in job.send)):
        own = os.path.normpath(os.path.join(job.working_directory or ".", "outputs"))
        if linked.is_named(path, (own, "outputs")):
            raise JobError(
                f"{option}={path!r}: {own!r} is the place of the run's own outputs. Copy what the script needs to another folder."
            )
    for path in job.send:
        if not os.path.lexists(directory / path):
            raise JobError(
                f"send={path!r}: there is no such file or folder in {str(directory)!r}. Give the path of one."
            )
        is_own = f"{os.path.realpath(directory / path)}/".startswith(f"{os.path.realpath(workspace_dir)}/")
        if why := linked.kept_back(directory, path, named=True) or "the workspace" * is_own:
            raise JobError(
                f"send={path!r} can't be sent to other machines: {why}. Name the data that the script reads."
            )


def _opened(script: str | None, working_directory: str | None) -> frozenset[str]:
    """Return what of the source is copied though a rule says otherwise: the script; its folder, the working directory and those
    above them, file by file.
    """
    inside = [os.path.dirname(script)] if script else []
    if working_directory is not None and working_directory.split("/")[0] != "..":
        inside.append(os.path.normpath(working_directory))
    parts = [path.split("/") for path in inside]
    folders = {"/".join(one[:count]) for one in parts for count in range(1, len(one) + 1)} - {"", "."}
    return frozenset({*folders, script} if script else folders)


def _check_conda(environment: EnvironmentSpec) -> None:
    # Looked for and not imported: only the process that builds the environment has a use for it.
    if environment.uses_conda and importlib.util.find_spec("rattler") is None:
        raise EnvironmentSpecError(
            f"conda_packages {list(environment.conda_packages)} need the conda extra, which is not installed here. "
            "Install it, no conda needed: pip install 'paceline[conda]'."
        )


def _check_datastores(reference: DataReference, workspace_dir: Path) -> None:
    """That the workspace knows them; whether they answer is found out while the run prepares."""
    from paceline.data.datasets.outputs import check_wish
    from paceline.data.stores.credentials import check_no_secrets
    from paceline.data.stores.datastore import Datastore
    from paceline.data.stores.names import clean_path

    check_wish(reference)
    for source in reference.sources:
        if source.datastore is None:
            # A URL is written into the run's record as it stands.
            check_no_secrets(source.path, {})
        else:
            clean_path(source.path, f"datastore {source.datastore!r}")
            here: Any = SimpleNamespace(path=workspace_dir)
            store = Datastore.get(here, source.datastore)
            if store.kind == "memory":
                raise DataError(
                    f"input {reference.name!r} lies in datastore {source.datastore!r}, which is the memory of this process: "
                    "a run's own processes can't see it. Upload the files to a store that they can reach."
                )
            if store.kind == "http" and reference.is_output:
                raise DataError(
                    f"output {reference.name!r} goes to datastore {source.datastore!r}, which can only be read (http). "
                    "Name another datastore."
                )


def _check_python(python: str) -> None:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        # -S leaves out the site module: a broken .pth file says nothing about the interpreter. The limit is for one on a
        # network file system that hangs.
        done = processes.said_by([python, "-S", "-c", code], timeout_s=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"python={python!r} can't be run: {error}. Give the path of a Python interpreter.") from error
    # Any program may have been named: /bin/true succeeds, and prints no version.
    version = re.fullmatch(r"(\d+)\.(\d+)", done.stdout.strip())
    if done.returncode != 0 or version is None or (int(version[1]), int(version[2])) < (3, 10):
        what = f"Python {version[0]}" if version else "no Python"
        raise JobError(f"python={python!r} is {what}; workers need Python 3.10 or later.")
