"""The options of `run` and `submit`, and what was given of them as a description (`paceline.cli.description`)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import completing
from paceline.cli.data_options import absolute_word
from paceline.cli.durations import duration_option
from paceline.errors import JobError
from paceline.job.job import BACKENDS

Script = Annotated[
    Path | None,
    typer.Argument(help="Python script or any program to run, or a job file (.yaml).", show_default=False),
]
Module = Annotated[
    str | None,
    typer.Option("-m", "--module", metavar="MODULE", help="Run a module, as `python -m` does, in place of a script."),
]
Arguments = Annotated[list[str] | None, typer.Argument(help="The script's own arguments, behind `--`.")]
Nodes = Annotated[
    str | None,
    typer.Option("-j", "--nodes", metavar="NxM", help="N nodes of M processes each; M alone is 1xM. Default: 1x1."),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help=f"How processes find each other: {', '.join(BACKENDS)}.",
        autocompletion=completing.backends,
    ),
]
ExperimentName = Annotated[
    str | None,
    typer.Option(
        "-e",
        "--experiment",
        metavar="NAME",
        help="Default: the name of the source folder.",
        autocompletion=completing.experiments,
    ),
]
SourceFolder = Annotated[
    Path | None,
    typer.Option(
        "--source", metavar="FOLDER", help="Folder to copy; default: the script's. The script runs in a copy of it."
    ),
]
DisplayName = Annotated[
    str | None, typer.Option("--name", metavar="TEXT", help="A name of the run's own beside its id, for people.")
]
Compute = Annotated[
    str | None,
    typer.Option(
        "--compute", metavar="TARGET", help="Compute target; default: local.", autocompletion=completing.targets
    ),
]
Gpu = Annotated[bool | None, typer.Option("--gpu/--no-gpu", help="One GPU for each process.", show_default=False)]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME[=VALUE]",
        help="Variable for the workers; may be repeated. NAME alone takes the value from your shell and records it nowhere.",
        autocompletion=completing.variables,
    ),
]
EnvFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--env-file",
        metavar="FILE",
        help="File of NAME=VALUE lines (dotenv) whose values are recorded nowhere; may be repeated.",
    ),
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="KEY[=VALUE]", help="Tag; may be repeated.", autocompletion=completing.tags),
]
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
    bool | None,
    typer.Option(
        "--isolated/--layered",
        help="Only the packages named, or beside those that the interpreter has. Default: layered.",
        show_default=False,
    ),
]
Registered = Annotated[
    str | None,
    typer.Option(
        "--environment",
        metavar="NAME",
        help="Registered environment, see `paceline env list`.",
        autocompletion=completing.environments,
    ),
]
Image = Annotated[
    str | None, typer.Option("--image", metavar="IMAGE", help="Run the workers in a container of this image.")
]
ShmSize = Annotated[
    str | None, typer.Option("--shm-size", metavar="SIZE", help="Of the container's /dev/shm; default: the host's.")
]
GpuVisibility = Annotated[
    str | None,
    typer.Option(
        "--gpu-visibility",
        metavar="worker|node",
        help="A process sees its own GPU, or all of its node's. Default: worker.",
        autocompletion=completing.gpu_visibilities,
    ),
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
    float | None, duration_option("--grace", help="Between SIGTERM and SIGKILL when a run is ended; default: 30s.")
]
Restarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts", metavar="N", help="Start over so often after a lost node or worker, preemption, a taken port."
    ),
]
RestartOnException = Annotated[
    bool | None,
    typer.Option(
        "--restart-on-exception/--no-restart-on-exception",
        help="Start over after the script's own exceptions as well.",
        show_default=False,
    ),
]
LogLimit = Annotated[
    str | None,
    typer.Option("--log-limit", metavar="SIZE", help="Kept of each worker's log, such as 500MB; 0 for all of it."),
]
ParameterServers = Annotated[
    int | None,
    typer.Option("--ps", metavar="N", help="With --backend ps: so many of the processes are parameter servers."),
]


def words(given: Mapping[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """The job file that was named, if one was, and all else that was given, as a description. given: option -> value, None
    where it was left out. Paths are absolute in a description, for it may be written down.

    Raises:
        JobError: one of them is wrong.
    """
    file, found = _entry(given["script"], given["source"], given["module"], given["arguments"] or [])
    if given["nodes"] is not None:
        found["node_count"], found["process_count_per_node"] = _nodes(given["nodes"])
    found |= _environment(given["env"])
    plain = {
        "experiment": given["experiment"],
        "display_name": given["name"],
        "distributed_backend": given["backend"],
        "compute_target": given["compute"],
        "use_gpu": given["gpu"],
        "gpu_visibility": given["gpu_visibility"],
        "parameter_server_count": given["ps"],
        "environment_definition": given["environment"],
        "python": given["python"],
        "pip_packages": given["pip"],
        "pip_requirements_file": one_file(given["requirements"]),
        "conda_packages": given["conda"],
        "conda_dependencies_file": given["conda_file"],
        "conda_channels": given["channel"],
        "layered": None if given["isolated"] is None else not given["isolated"],
        "custom_docker_image": given["image"],
        "shm_size": given["shm_size"],
        "env_file": [os.path.abspath(os.path.expanduser(path)) for path in given["env_file"] or ()],
        "tags": pairs("--tag", given["tag"], needs_value=False),
        "inputs": [absolute_word("--input", word) for word in given["inputs"] or ()],
        "outputs": given["outputs"],
        "max_run_duration_seconds": given["max_duration"],
        "grace_period_seconds": given["grace"],
        "max_restarts": given["max_restarts"],
        "restart_on_exception": given["restart_on_exception"],
        "log_limit": given["log_limit"],
    }
    return file, found | {key: value for key, value in plain.items() if value not in (None, [], {})}


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


def pairs(option: str, given: list[str] | None, *, needs_value: bool) -> dict[str, Any]:
    """`KEY=VALUE` words as a dict; a bare KEY has None.

    Raises:
        JobError: a word without a key, or without a value where one is needed.
    """
    found: dict[str, Any] = {}
    for word in given or ():
        key, equals, value = word.partition("=")
        if not key or (needs_value and not equals):
            raise JobError(f"{option} {word!r} is not {'NAME=VALUE' if needs_value else 'KEY or KEY=VALUE'}.")
        found[key] = value if equals else None
    return found


def _entry(
    script: Path | None, source: Path | None, module: str | None, arguments: list[str]
) -> tuple[Path | None, dict[str, Any]]:
    """The job file; else the source folder, and the script's path or the module in it."""
    found: dict[str, Any] = {}
    if source is not None:
        found["source_directory"] = str(source.absolute())
    if module is not None:
        if script is not None and script.suffix == ".py" and script.is_file() and "--" not in sys.argv:
            raise JobError(
                f"{str(script)!r} and -m {module}: only one can run. Leave one out, or put the module's arguments behind `--`."
            )
        # What stands behind `--` is the module's own, for there is no script.
        arguments = [*([str(script)] if script is not None else []), *arguments]
        found = {"source_directory": str(Path.cwd()), **found, "entry_module": module}
    if arguments:
        found["arguments"] = arguments
    if module is not None:
        return None, found
    if script is None:
        raise JobError(
            "name what to run: a script (paceline run train.py), a module (paceline run -m package.train) or a job file "
            "(paceline run job.yaml)."
        )
    if script.is_dir():
        raise JobError(f"{str(script)!r} is a folder. Name the Python file in it that is to run.")
    if not script.is_file():
        # A bare name may be a program of the machine that it is to run on, such as nvidia-smi.
        if len(script.parts) == 1 and script.suffix not in (".py", ".yaml", ".yml"):
            return None, {"source_directory": str(Path.cwd()), "entry_script": script.name, **found}
        raise JobError(f"there is no script {str(script)!r} here ({Path.cwd()}). Give the path of a Python file.")
    if script.suffix in (".yaml", ".yml"):
        return script.absolute(), found
    if source is None:
        return None, {"source_directory": str(script.absolute().parent), "entry_script": script.name, **found}
    try:
        return None, {**found, "entry_script": os.path.relpath(script.absolute(), source.absolute())}
    except ValueError as error:
        raise JobError(f"{str(script)!r} does not lie in --source {str(source)!r}.") from error


def _environment(given: list[str] | None) -> dict[str, Any]:
    """`--env NAME=VALUE` is written down, `--env NAME` is not."""
    variables: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for name, value in pairs("--env", given, needs_value=False).items():
        if value is None:
            secrets[name] = f"env:{name}"
        else:
            variables[name] = value
    return {key: value for key, value in (("environment_variables", variables), ("secrets", secrets)) if value}


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
    if match is None or int(match[1] or 1) < 1 or int(match[2]) < 1:
        raise JobError(
            f"-j {text!r} is not NxM. Write 2x4 for two nodes of four processes each, or 4 for one node of four."
        )
    return int(match[1] or 1), int(match[2])
