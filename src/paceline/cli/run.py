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

from paceline.cli.asked import (
    Arguments,
    Asked,
    Backend,
    Channels,
    Compute,
    Conda,
    CondaFile,
    ExperimentName,
    Gpu,
    GpuVisibility,
    Grace,
    Image,
    Inputs,
    Isolated,
    Limit,
    LogLimit,
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
    asked,
)
from paceline.cli.common import complete_run_id, folder_of, print_json
from paceline.cli.summary import summary
from paceline.cli.view import Following, RunView, print_end
from paceline.environments.environment import Environment
from paceline.errors import RunStateError
from paceline.job import DEFAULT_GRACE_S, Job
from paceline.runs import store
from paceline.runs.files import read_json
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, user_name
from paceline.workspace import Experiment, Workspace

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job, its commands and environment; start nothing.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only the script's output, and errors.")]
Detach = Annotated[bool, typer.Option("-d", "--detach", help="Return at once.")]
RunId = Annotated[str, typer.Argument(help="Run, or the beginning of its id.", autocompletion=complete_run_id)]


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
        script: Script,
        arguments: Arguments = None,
        nodes: Nodes = "1x1",
        backend: Backend = None,
        experiment: ExperimentName = None,
        source: SourceFolder = None,
        compute: Compute = "local",
        gpu: Gpu = False,
        gpu_visibility: GpuVisibility = "worker",
        env: Variables = None,
        tag: Tags = None,
        python: Python = None,
        pip: Pip = None,
        requirements: Requirements = None,
        conda: Conda = None,
        conda_file: CondaFile = None,
        channel: Channels = None,
        isolated: Isolated = False,
        environment: Registered = None,
        image: Image = None,
        shm_size: ShmSize = None,
        inputs: Inputs = None,
        outputs: Outputs = None,
        max_duration: Limit = None,
        grace: Grace = DEFAULT_GRACE_S,
        max_restarts: Restarts = 0,
        restart_on_exception: RestartOnException = False,
        log_limit: LogLimit = "2GB",
        ps: ParameterServers = 0,
        as_json: Json = False,
        dry_run: DryRun = False,
        quiet: Quiet = False,
    ) -> int:
        words = asked(
            script=script,
            arguments=arguments,
            nodes=nodes,
            backend=backend,
            experiment=experiment,
            source=source,
            compute=compute,
            gpu=gpu,
            gpu_visibility=gpu_visibility,
            env=env,
            tag=tag,
            python=python,
            pip=pip,
            requirements=requirements,
            conda=conda,
            conda_file=conda_file,
            channel=channel,
            isolated=isolated,
            environment=environment,
            image=image,
            shm_size=shm_size,
            inputs=inputs,
            outputs=outputs,
            max_duration=max_duration,
            grace=grace,
            max_restarts=max_restarts,
            restart_on_exception=restart_on_exception,
            log_limit=log_limit,
            ps=ps,
        )
        if dry_run:
            from paceline.cli.dry_run import print_plan

            return print_plan(words, as_json=as_json)
        folder = _submit(words)
        if follow:
            return _follow(folder, as_json=as_json, quiet=quiet)
        _print_submitted(folder, as_json)
        return 0

    return verb


def rerun(run_id: RunId, detach: Detach = False, as_json: Json = False, quiet: Quiet = False) -> int:
    """Submit a run's job again, with the source and the exact versions of the packages as they were then."""
    from paceline.submit import Source
    from paceline.submit import submit as submit_job

    old = store.read(folder_of(run_id))
    if old.job is None or old.snapshot_id is None:
        raise RunStateError(f"run {old.run_id} was not submitted but logged by a program, which alone can run again.")
    workspace = Workspace.from_config()
    folder = submit_job(
        _with_locked_environment(old.job, folder_of(run_id)),
        Source(directory=Path(old.source_directory or "."), snapshot_id=old.snapshot_id, git=old.git),
        workspace.path,
        old.experiment,
        tags={"rerun_of": old.run_id},
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


def _submit(words: Asked) -> RunFolder:
    experiment = Experiment(Workspace.from_config(), words.experiment)
    progress = _HashingProgress()
    submitted = experiment.submit(words.job, tags=words.tags, source_directory=words.directory, progress=progress)
    progress.clear()
    return submitted.folder


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
    record = store.read(folder)
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
    return f"Run {record.run_id}: {job.entry_script} on {record.target}, {shape}{backend}"


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
                record = store.read(folder)
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
                store.request_cancel(folder, by=user_name(), reason="Ctrl-C")
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
