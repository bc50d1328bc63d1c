"""run, submit, rerun: start a run, and with `run` and `rerun` follow it to its end."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.common import complete_run_id, folder_of, print_json
from paceline.cli.summary import summary
from paceline.cli.view import Following, RunView, print_end
from paceline.errors import JobError, RunStateError
from paceline.job import BACKENDS, DEFAULT_GRACE_S, Job
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, user_name
from paceline.workspace import Experiment, Workspace, not_installed

Script = Annotated[Path, typer.Argument(help="Python script to run.", show_default=False)]
Arguments = Annotated[list[str] | None, typer.Argument(help="The script's own arguments, behind `--`.")]
Nodes = Annotated[
    str, typer.Option("-j", "--nodes", metavar="NxM", help="N nodes of M processes each; M alone is 1xM.")
]
Backend = Annotated[
    str | None, typer.Option("--backend", metavar="NAME", help=f"How processes find each other: {', '.join(BACKENDS)}.")
]
ExperimentName = Annotated[
    str | None, typer.Option("-e", "--experiment", metavar="NAME", help="Default: the name of the source folder.")
]
SourceFolder = Annotated[
    Path | None,
    typer.Option(
        "--source", metavar="FOLDER", help="Folder to copy; default: the script's. The script runs in a copy of it."
    ),
]
Compute = Annotated[str, typer.Option("--compute", metavar="TARGET", help="Compute target.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="One GPU for each process.")]
Variables = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Variable for the workers; may be repeated.")
]
Tags = Annotated[list[str] | None, typer.Option("--tag", metavar="KEY[=VALUE]", help="Tag; may be repeated.")]
Python = Annotated[str | None, typer.Option("--python", metavar="PATH", help="Interpreter that runs the script.")]
Limit = Annotated[
    float | None, typer.Option("--max-duration", metavar="SECONDS", help="End the run as failed after so long.")
]
Grace = Annotated[
    float, typer.Option("--grace", metavar="SECONDS", help="Between SIGTERM and SIGKILL when a run is ended.")
]
Restarts = Annotated[
    int, typer.Option("--max-restarts", metavar="N", help="Start over so often when a worker was killed from outside.")
]
ParameterServers = Annotated[
    int, typer.Option("--ps", metavar="N", help="With --backend ps: so many of the processes are parameter servers.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job, its commands and environment; start nothing.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only the script's output, and errors.")]
Detach = Annotated[bool, typer.Option("-d", "--detach", help="Return at once.")]
RunId = Annotated[str, typer.Argument(help="Run, or the beginning of its id.", autocompletion=complete_run_id)]


def add_to(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("submit")(submit)
    app.command("rerun")(rerun)


def run(
    script: Script,
    arguments: Arguments = None,
    nodes: Nodes = "1x1",
    backend: Backend = None,
    experiment: ExperimentName = None,
    source: SourceFolder = None,
    compute: Compute = "local",
    gpu: Gpu = False,
    env: Variables = None,
    tag: Tags = None,
    python: Python = None,
    max_duration: Limit = None,
    grace: Grace = DEFAULT_GRACE_S,
    max_restarts: Restarts = 0,
    ps: ParameterServers = 0,
    as_json: Json = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> int:
    """Submit a script and follow it to its end. Exits as the script did.

    Ctrl-C asks whether to detach or to cancel; a second Ctrl-C cancels.
    """
    asked = _asked(
        script, arguments, nodes, backend, source, compute, gpu, env, python, max_duration, grace, max_restarts, ps
    )
    if dry_run:
        return _print_plan(asked, experiment, as_json)
    folder = _submit(asked, experiment, tag)
    return _follow(folder, as_json=as_json, quiet=quiet)


def submit(
    script: Script,
    arguments: Arguments = None,
    nodes: Nodes = "1x1",
    backend: Backend = None,
    experiment: ExperimentName = None,
    source: SourceFolder = None,
    compute: Compute = "local",
    gpu: Gpu = False,
    env: Variables = None,
    tag: Tags = None,
    python: Python = None,
    max_duration: Limit = None,
    grace: Grace = DEFAULT_GRACE_S,
    max_restarts: Restarts = 0,
    ps: ParameterServers = 0,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> int:
    """Submit a script and return at once with the run's id."""
    asked = _asked(
        script, arguments, nodes, backend, source, compute, gpu, env, python, max_duration, grace, max_restarts, ps
    )
    if dry_run:
        return _print_plan(asked, experiment, as_json)
    _print_submitted(_submit(asked, experiment, tag), as_json)
    return 0


def rerun(run_id: RunId, detach: Detach = False, as_json: Json = False, quiet: Quiet = False) -> int:
    """Submit a run's job again, with the source as it was then."""
    from paceline.submit import Source
    from paceline.submit import submit as submit_job

    old = store.read(folder_of(run_id))
    if old.job is None or old.snapshot_id is None:
        raise RunStateError(f"run {old.run_id} was not submitted but logged by a program, which alone can run again.")
    workspace = Workspace.from_config()
    folder = submit_job(
        old.job,
        Source(directory=Path(old.source_directory or "."), snapshot_id=old.snapshot_id, git=old.git),
        workspace.path,
        old.experiment,
        tags={"rerun_of": old.run_id},
    )
    if detach:
        _print_submitted(folder, as_json)
        return 0
    return _follow(folder, as_json=as_json, quiet=quiet)


# --- from words to a job


def _asked(
    script: Path,
    arguments: list[str] | None,
    nodes: str,
    backend: str | None,
    source: Path | None,
    compute: str,
    gpu: bool,
    env: list[str] | None,
    python: str | None,
    max_duration: float | None,
    grace: float,
    max_restarts: int,
    ps: int,
) -> tuple[Job, Path]:
    """The job and its source folder."""
    from paceline.estimator import interpreter

    directory, entry_script = _entry(script, source)
    node_count, process_count = _nodes(nodes)
    counts: dict[str, Any] = {"node_count": node_count, "process_count_per_node": process_count}
    if backend == "ps":
        workers = node_count * process_count - ps
        counts = {"node_count": node_count, "worker_count": workers, "parameter_server_count": ps}
    elif ps:
        raise JobError(f"--ps {ps} belongs to --backend ps.")
    job = Job(
        entry_script=entry_script,
        arguments=tuple(arguments or ()),
        compute_target=compute,
        distributed_backend=backend,
        use_gpu=gpu,
        python=interpreter(python),
        environment_variables=_pairs("--env", env, needs_value=True),
        max_run_duration_seconds=max_duration,
        grace_period_seconds=grace,
        max_restarts=max_restarts,
        **counts,
    )
    return job, directory


def _entry(script: Path, source: Path | None) -> tuple[Path, str]:
    """The source folder and the script's path in it."""
    if not script.is_file():
        raise JobError(f"there is no script {str(script)!r} here ({Path.cwd()}). Give the path of a Python file.")
    if source is None:
        return script.absolute().parent, script.name
    try:
        return source.absolute(), os.path.relpath(script.absolute(), source.absolute())
    except ValueError as error:
        raise JobError(f"{str(script)!r} does not lie in --source {str(source)!r}.") from error


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
    if match is None or int(match[1] or 1) < 1 or int(match[2]) < 1:
        raise JobError(
            f"-j {text!r} is not NxM. Write 2x4 for two nodes of four processes each, or 4 for one node of four."
        )
    return int(match[1] or 1), int(match[2])


def _pairs(option: str, words: list[str] | None, *, needs_value: bool) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not key or (needs_value and not equals):
            raise JobError(f"{option} {word!r} is not {'NAME=VALUE' if needs_value else 'KEY or KEY=VALUE'}.")
        pairs[key] = value if equals else None
    return pairs


def _experiment_name(name: str | None, directory: Path) -> str:
    """The name given, or one made of the source folder's."""
    if name is not None:
        return name
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", directory.name).strip("-_")[:100]
    return plain or "default"


def _submit(asked: tuple[Job, Path], experiment: str | None, tags: list[str] | None) -> RunFolder:
    job, directory = asked
    workspace = Workspace.from_config()
    exp = Experiment(workspace, _experiment_name(experiment, directory))
    for line in not_installed(job):
        print(f"paceline: {line}", file=sys.stderr)
    progress = _HashingProgress()
    submitted = exp.submit(
        job, tags=_pairs("--tag", tags, needs_value=False), source_directory=directory, progress=progress
    )
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
    view = RunView(size, quiet=quiet)
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
    asked = False
    while True:
        try:
            return following.to_the_end()
        except KeyboardInterrupt:
            record = store.read(folder)
            if record.is_terminal:
                return record
            if not asked and sys.stdin.isatty() and sys.stderr.isatty():
                asked = True
                answer = _ask()
                if answer == "d":
                    return record
                if answer != "c":
                    continue
            view.say("Canceling; the workers have their grace period to end.")
            store.request_cancel(folder, by=user_name(), reason="Ctrl-C")
            asked = True


def _ask() -> str:
    """The answer's first letter; Ctrl-C again is a "c"."""
    question = "\nInterrupted. [d]etach and let the run go on, [c]ancel it, or Enter to keep following? "
    try:
        print(question, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower()[:1]
    except KeyboardInterrupt:
        return "c"


# --- dry run


def _print_plan(asked: tuple[Job, Path], experiment: str | None, as_json: bool) -> int:
    """The resolved job, the commands that would start its workers, and what these would find in their environment."""
    from paceline.launchers import environment, get_launcher
    from paceline.plan import Launch
    from paceline.submit import check
    from paceline.targets import get_target

    job, directory = asked
    check(job)
    granted = get_target(job.compute_target).preview(job)
    run_dir = Path("<workspace>/runs/<run id>")
    launch = Launch(
        job=job,
        run_id="<run id>",
        experiment=_experiment_name(experiment, directory),
        workspace_name="<workspace>",
        run_dir=run_dir,
        work_dir=run_dir / "work",
        scratch_dir=Path("<scratch folder>"),
        library_dir=Path("<library>"),
        python=job.python or sys.executable,
        nodes=granted.nodes,
        ports=granted.ports,
    )
    commands = [
        environment.with_python_path(command, launch, environment.inherited(os.environ))
        for command in get_launcher(job.launcher).commands(launch)
    ]
    if as_json:
        print_json(
            {
                "job": job.to_json(),
                "source_directory": str(directory),
                "commands": [
                    {
                        "node_rank": command.node_rank,
                        "ranks": list(command.ranks),
                        "argv": list(command.argv),
                        "environment": {**command.defaults, **command.environment},
                    }
                    for command in commands
                ],
            }
        )
        return 0
    print(f"Source: {directory}\nJob:")
    for name, value in job.to_json().items():
        print(f"  {name}: {value!r}")
    for command in commands:
        print(
            f"\nOn node {command.node_rank}, for rank {', '.join(map(str, command.ranks))}:\n  {shlex.join(command.argv)}"
        )
        for name, value in sorted({**command.defaults, **command.environment}.items()):
            print(f"    {name}={shlex.quote(value)}")
    print("\nNothing was started. Ports and folders in <> are chosen when the run starts.")
    return 0
