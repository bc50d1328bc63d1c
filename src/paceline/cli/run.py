"""run, submit, rerun: start a run, and with `run` and `rerun` follow it to its end."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import completing
from paceline.cli.common import folder_of, print_json
from paceline.cli.description import Asked, asked, combined
from paceline.cli.env_file import read_env_files
from paceline.cli.run_options import (
    Arguments,
    Backend,
    Channels,
    Compute,
    Conda,
    CondaFile,
    DisplayName,
    EnvFiles,
    ExperimentName,
    Gpu,
    GpuVisibility,
    Grace,
    Image,
    Inputs,
    Isolated,
    Limit,
    LogLimit,
    Module,
    Nodes,
    Outputs,
    ParameterServers,
    Pip,
    Python,
    Registered,
    Requirements,
    RestartOnException,
    Restarts,
    Script,
    ShmSize,
    SourceFolder,
    Tags,
    Variables,
    words,
)
from paceline.cli.summary import summary
from paceline.cli.view import Following, RunView, print_end
from paceline.environments.environment import Environment
from paceline.errors import JobError, RunStateError
from paceline.job.job import Job
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, user_name
from paceline.system.files import read_json
from paceline.workspace import Workspace

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job, its commands and environment; start nothing.")]
AsYaml = Annotated[bool, typer.Option("--yaml", help="With --dry-run: print the job as a file for `paceline run`.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only the script's output, and errors.")]
Detach = Annotated[bool, typer.Option("-d", "--detach", help="Return at once.")]
RunId = Annotated[str, typer.Argument(help="Run, or the beginning of its id.", autocompletion=completing.run_ids)]


def add_to(app: typer.Typer) -> None:
    app.command("run", help=_RUN_HELP)(_verb(follow=True))
    app.command("submit", help=_SUBMIT_HELP)(_verb(follow=False))
    app.command("rerun")(rerun)


_RUN_HELP = """Submit a script and follow it to its end. Exits as the script did.

Ctrl-C asks whether to detach or to cancel; a second Ctrl-C cancels."""
_SUBMIT_HELP = "Submit a script and return at once with the run's id."


def _verb(*, follow: bool) -> Callable[..., int]:
    """`run`, or `submit`: the same words, followed to the end or not."""

    def verb(
        script: Script = None,
        arguments: Arguments = None,
        module: Module = None,
        nodes: Nodes = None,
        backend: Backend = None,
        experiment: ExperimentName = None,
        name: DisplayName = None,
        source: SourceFolder = None,
        compute: Compute = None,
        gpu: Gpu = None,
        gpu_visibility: GpuVisibility = None,
        env: Variables = None,
        env_file: EnvFiles = None,
        tag: Tags = None,
        python: Python = None,
        pip: Pip = None,
        requirements: Requirements = None,
        conda: Conda = None,
        conda_file: CondaFile = None,
        channel: Channels = None,
        isolated: Isolated = None,
        environment: Registered = None,
        image: Image = None,
        shm_size: ShmSize = None,
        inputs: Inputs = None,
        outputs: Outputs = None,
        max_duration: Limit = None,
        grace: Grace = None,
        max_restarts: Restarts = None,
        restart_on_exception: RestartOnException = None,
        log_limit: LogLimit = None,
        ps: ParameterServers = None,
        as_json: Json = False,
        dry_run: DryRun = False,
        as_yaml: AsYaml = False,
        quiet: Quiet = False,
    ) -> int:
        # First of all, so that these are the options and nothing else.
        file, description = words(locals())
        if as_yaml and not dry_run:
            raise JobError(
                "--yaml belongs to --dry-run: together they print the job as a file that `paceline run` takes."
            )
        if file is not None:
            from paceline.cli import job_file

            description = combined(job_file.read(file), description)
        wanted = asked(description)
        if dry_run:
            from paceline.cli.dry_run import print_file, print_plan

            return print_file(wanted, description) if as_yaml else print_plan(wanted, as_json=as_json)
        folder = _submit(wanted)
        if follow:
            return _follow(folder, as_json=as_json, quiet=quiet)
        _print_submitted(folder, as_json)
        return 0

    return verb


def rerun(
    run_id: RunId,
    name: DisplayName = None,
    env_file: EnvFiles = None,
    detach: Detach = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Submit a run's job again, with the source and the exact versions of the packages as they were then.

    Values that were not recorded are taken anew: from your shell, or the file that --env-file names.
    """
    from paceline.submit import SourceCopy
    from paceline.submit import submit as submit_job

    values, _ = read_env_files([Path(path) for path in env_file or ()])
    old = read.record(folder_of(run_id))
    if old.job is None or old.snapshot_id is None:
        raise RunStateError(f"run {old.run_id} was not submitted but logged by a program, which alone can run again.")
    workspace = Workspace.from_config()
    folder = submit_job(
        _with_locked_environment(old.job, folder_of(run_id)),
        SourceCopy(directory=Path(old.source_directory or "."), snapshot_id=old.snapshot_id, git=old.git),
        workspace.path,
        old.experiment,
        tags={"rerun_of": old.run_id},
        display_name=name,
        values=values,
    )
    if detach:
        _print_submitted(folder, as_json)
        return 0
    return _follow(folder, as_json=as_json, quiet=quiet)


def _with_locked_environment(job: Job, folder: RunFolder) -> Job:
    """The job with the versions that its environment came to have, where one was built."""
    built = read_json(folder.environment)
    if not built:
        return job
    return dataclasses.replace(job, environment=Environment.from_json(built["locked"]))


def _submit(wanted: Asked) -> RunFolder:
    from paceline.submit import SourceCopy
    from paceline.submit import submit as submit_job

    progress = _HashingProgress()
    folder = submit_job(
        wanted.job,
        SourceCopy(directory=wanted.directory.absolute()),
        Workspace.from_config().path,
        wanted.experiment,
        tags=wanted.tags,
        progress=progress,
        display_name=wanted.display_name,
        values=wanted.values,
        leave_out=wanted.leave_out,
    )
    progress.clear()
    return folder


class _HashingProgress:
    """A line on the terminal while a large source is hashed; nothing for the first half second, nor elsewhere."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._start > 0.5 and now - self._shown > 0.1:
            self._shown = now
            print(
                f"\r\x1b[2KCopying the source: {done / 2**20:.0f} of {total / 2**20:.0f} MiB",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


# --- showing it


def _print_submitted(folder: RunFolder, as_json: bool) -> None:
    if as_json:
        print_json(summary(folder))
        return
    run_id = folder.run_id
    print(run_id)
    print(
        f"\nFollow it:  paceline logs -f {run_id}\nSee it:     paceline status {run_id}\nEnd it:     paceline cancel {run_id}",
        file=sys.stderr,
    )


def _follow(folder: RunFolder, *, as_json: bool, quiet: bool) -> int:
    record = read.record(folder)
    size = record.job.world_size if record.job else 1
    view = RunView(size, quiet=quiet, nodes=record.job.node_count if record.job else 1)
    view.say(_headline(record))
    if as_json:
        # Standard output is for the JSON alone.
        sys.stdout, kept = sys.stderr, sys.stdout
    try:
        record = _follow_with_interrupts(folder, view)
    finally:
        if as_json:
            sys.stdout = kept
    if not record.is_terminal:
        view.say(f"Detached. The run goes on; follow it with: paceline logs -f {folder.run_id}")
        return 0
    print_end(folder, record, view)
    if as_json:
        print_json(summary(folder))
    return record.exit_code if record.exit_code is not None else 1


def _headline(record: RunRecord) -> str:
    job = record.job
    assert job is not None
    if job.world_size == 1:
        shape = "1 process"
    elif job.distributed_backend == "ps":
        shape = f"{job.worker_count} workers, {job.parameter_server_count} parameter servers"
    else:
        nodes = f"{job.node_count} node{'s' * (job.node_count > 1)}"
        shape = f"{nodes} x {job.process_count_per_node} process{'es' * (job.process_count_per_node > 1)}"
    backend = f", {job.distributed_backend}" if job.distributed_backend else ""
    return f"Run {record.run_id}: {' '.join(job.entry_words)} on {record.target}, {shape}{backend}"


def _follow_with_interrupts(folder: RunFolder, view: RunView) -> RunRecord:
    """Follow; Ctrl-C asks once, and cancels if pressed again or if there is nobody to ask."""
    following = Following(folder, view)
    asked = canceled = False
    with _Interrupts() as interrupts:
        while True:
            try:
                interrupts.let_one_through()
                return following.to_the_end()
            except KeyboardInterrupt:
                record = read.record(folder)
                if record.is_terminal:
                    return record
                if canceled:
                    continue
                if not asked and sys.stdin.isatty() and sys.stderr.isatty():
                    asked = True
                    answer = _ask(interrupts)
                    if answer == "d":
                        return record
                    if answer != "c":
                        continue
                read.request_cancel(folder, by=user_name(), reason="Ctrl-C")
                canceled = True
                view.say("Canceling; the workers have their grace period to end.")


class _Interrupts:
    """Ctrl-C as KeyboardInterrupt, but only once each time it is let through: a key that is pressed again must not cut
    short what the first press has begun."""

    def __init__(self) -> None:
        self._through = False

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def let_one_through(self) -> None:
        self._through = True

    def _handle(self, number: int, frame: object) -> None:
        if self._through:
            self._through = False
            raise KeyboardInterrupt


def _ask(interrupts: _Interrupts) -> str:
    """The answer's first letter; Ctrl-C again is a "c"."""
    question = "\nInterrupted. [d]etach and let the run go on, [c]ancel it, or Enter to keep following? "
    try:
        interrupts.let_one_through()
        print(question, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower()[:1]
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return "c"
