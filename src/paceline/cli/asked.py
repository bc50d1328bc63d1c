"""What `run` and `submit` are asked on the command line, and the job that it comes to."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import JobError
from paceline.estimator import interpreter
from paceline.job import BACKENDS, Job

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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A job, the folder of its source, its experiment's name and its tags."""

    job: Job
    directory: Path
    experiment: str
    tags: dict[str, Any]


def asked(
    *,
    script: Path,
    arguments: list[str] | None,
    nodes: str,
    backend: str | None,
    experiment: str | None,
    source: Path | None,
    compute: str,
    gpu: bool,
    env: list[str] | None,
    tag: list[str] | None,
    python: str | None,
    max_duration: float | None,
    grace: float,
    max_restarts: int,
    ps: int,
) -> Asked:
    """What the words come to.

    Raises:
        JobError: one of them is wrong.
    """
    directory, entry_script = _entry(script, source)
    node_count, process_count = _nodes(nodes)
    counts: dict[str, Any] = {"node_count": node_count, "process_count_per_node": process_count}
    if backend is None and node_count * process_count > 1:
        raise JobError(
            f"-j {nodes} makes {node_count * process_count} processes. Say how they find each other: "
            "--backend mpi, gloo, nccl or tensorflow."
        )
    if backend == "ps" and not 0 < ps < node_count * process_count:
        raise JobError(
            f"--backend ps with -j {nodes} and --ps {ps}: of the {node_count * process_count} processes, --ps says how many are "
            "parameter servers; at least one has to be, and one a worker."
        )
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
    return Asked(
        job=job,
        directory=directory,
        experiment=_experiment_name(experiment, directory),
        tags=_pairs("--tag", tag, needs_value=False),
    )


def _entry(script: Path, source: Path | None) -> tuple[Path, str]:
    """The source folder and the script's path in it."""
    if script.is_dir():
        raise JobError(f"{str(script)!r} is a folder. Name the Python file in it that is to run.")
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
