"""What `run` and `submit` are asked on the command line, and the job that it comes to."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.data_words import data_words
from paceline.cli.durations import duration_option
from paceline.environments.described import described
from paceline.environments.environment import Environment
from paceline.errors import JobError
from paceline.estimator import interpreter
from paceline.estimator import log_limit as limit_of_logs
from paceline.job import BACKENDS, Job
from paceline.workspace import Workspace

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
Python = Annotated[
    str | None,
    typer.Option(
        "--python", metavar="PATH", help="Interpreter that runs the script, or that its environment is made from."
    ),
]
Pip = Annotated[
    list[str] | None, typer.Option("--pip", metavar="PACKAGE", help="Package for the script; may be repeated.")
]
Requirements = Annotated[
    list[str] | None,
    typer.Option("--requirements", "-r", metavar="FILE", help="pip's requirements file for the script."),
]
Conda = Annotated[
    list[str] | None, typer.Option("--conda", metavar="PACKAGE", help="Conda package for the script; may be repeated.")
]
CondaFile = Annotated[
    str | None, typer.Option("--conda-file", metavar="FILE", help="Conda's environment.yml for the script.")
]
Channels = Annotated[
    list[str] | None,
    typer.Option("--channel", metavar="CHANNEL", help="Conda channel, first has priority; default: conda-forge."),
]
Isolated = Annotated[
    bool, typer.Option("--isolated", help="Only the packages named, not those that the interpreter has as well.")
]
Registered = Annotated[
    str | None, typer.Option("--environment", metavar="NAME", help="Registered environment, see `paceline env list`.")
]
Image = Annotated[
    str | None, typer.Option("--image", metavar="IMAGE", help="Run the workers in a container of this image.")
]
ShmSize = Annotated[
    str | None, typer.Option("--shm-size", metavar="SIZE", help="Of the container's /dev/shm; default: the host's.")
]
GpuVisibility = Annotated[
    str,
    typer.Option("--gpu-visibility", metavar="worker|node", help="A process sees its own GPU, or all of its node's."),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=[STORE:]PATH",
        help="Data that the script finds under $PACELINE_INPUT_<NAME>; may be repeated. "
        "Add ,partition=rank or ,partition=node for a part each.",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        metavar="NAME=STORE:PATH",
        help="Folder $PACELINE_INPUT_<NAME> whose files are stored there at the end; may be repeated. "
        "Add ,overwrite to replace what is there.",
    ),
]
Limit = Annotated[
    float | None, duration_option("--max-duration", help="End the run as failed after so long, such as 90s or 1h30m.")
]
Grace = Annotated[
    float, duration_option("--grace", help="Between SIGTERM and SIGKILL when a run is ended; default: 30s.")
]
Restarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", metavar="N", help="Start over so often after a lost node or worker, preemption, a taken port."
    ),
]
RestartOnException = Annotated[
    bool, typer.Option("--restart-on-exception", help="Start over after the script's own exceptions as well.")
]
LogLimit = Annotated[
    str, typer.Option("--log-limit", metavar="SIZE", help="Kept of each worker's log, such as 500MB; 0 for all of it.")
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
    gpu_visibility: str,
    python: str | None,
    pip: list[str] | None,
    requirements: list[str] | None,
    conda: list[str] | None,
    conda_file: str | None,
    channel: list[str] | None,
    isolated: bool,
    environment: str | None,
    image: str | None,
    shm_size: str | None,
    inputs: list[str] | None,
    outputs: list[str] | None,
    max_duration: float | None,
    grace: float,
    max_restarts: int,
    restart_on_exception: bool,
    log_limit: str,
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
    if isolated and not (pip or requirements or conda or conda_file):
        raise JobError("--isolated without packages: there would be no environment to isolate. Name some with --pip.")
    wanted = described(
        definition=Environment.get(Workspace.from_config(create=False), environment) if environment else None,
        source_directory=directory,
        python=interpreter(python) if image is None else python,
        layered=not isolated,
        user_managed=False,
        pip_packages=pip,
        pip_requirements_file=one_file(requirements),
        conda_packages=conda,
        conda_channels=channel,
        conda_dependencies_file=conda_file,
        docker_image=image,
        shm_size=shm_size,
    )
    if restart_on_exception and max_restarts == 0:
        raise JobError("--restart-on-exception without --max-restarts: say how often, such as --max-restarts 3.")
    variables = _pairs("--env", env, needs_value=True)
    job = Job(
        entry_script=entry_script,
        arguments=tuple(arguments or ()),
        compute_target=compute,
        distributed_backend=backend,
        use_gpu=gpu,
        gpu_visibility=gpu_visibility,
        environment=wanted,
        environment_variables={**wanted.environment_variables, **variables},
        inputs=data_words(inputs, outputs),
        max_run_duration_seconds=max_duration,
        grace_period_seconds=grace,
        max_restarts=max_restarts,
        restart_on_exception=restart_on_exception,
        log_limit=limit_of_logs(log_limit),
        **counts,
    )
    return Asked(
        job=job,
        directory=directory,
        experiment=_experiment_name(experiment, directory),
        tags=_pairs("--tag", tag, needs_value=False),
    )


def one_file(requirements: list[str] | None) -> str | None:
    """The one requirements file that was named.

    Raises:
        JobError: several were.
    """
    if requirements and len(requirements) > 1:
        raise JobError(
            f"--requirements was given {len(requirements)} times ({', '.join(requirements)}). Give one file, which may "
            "include others by lines such as: -r other.txt."
        )
    return requirements[0] if requirements else None


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
