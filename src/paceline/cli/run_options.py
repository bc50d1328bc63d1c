"""Options of `run`, `submit` and `rerun`, and how they become a job's description."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from paceline.cli.options import DETACH, JSON, Duration, Given, VerbOption
from paceline.errors import JobError
from paceline.job.notify import EVENTS

# Don't import TYPE_CHECKING from typing, which loads slowly.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

#: Options that `run` and `env build` share.
PACKAGES = (
    VerbOption("--pip", "Package for the script; may be repeated.", "PACKAGE", list, key="pip_packages"),
    VerbOption("--requirements -r", "pip's requirements file for the script.", "FILE", list),
    VerbOption("--conda", "Conda package for the script; may be repeated.", "PACKAGE", list, key="conda_packages"),
    VerbOption("--conda-file", "Conda's environment.yml for the script.", "FILE", key="conda_dependencies_file"),
    VerbOption(
        "--channel",
        "Conda channel, in order of priority; may be repeated. Default: conda-forge.",
        "CHANNEL",
        list,
        key="conda_channels",
    ),
)
PYTHON = VerbOption("--python", "Interpreter of the script, or the base of its environment.", "PATH", key="python")
ISOLATED = VerbOption(
    "--isolated/--layered",
    "Use only the named packages, or add them to the interpreter's. Default: layered.",
    type=bool,
)
NAME = VerbOption("--name", "Display name of the run, in addition to its id.", "TEXT", key="display_name")
ENV_FILE = VerbOption(
    "--env-file", "File of NAME=VALUE lines (dotenv), whose values are not recorded; may be repeated.", "FILE", list
)
QUIET = VerbOption("-q --quiet", "Print only the script's output, and errors.", type=bool)

BACKEND = VerbOption(
    "--backend",
    "Communication between processes: mpi, gloo, nccl, ps, tensorflow.",
    "NAME",
    key="distributed_backend",
    complete="backends",
)

#: Options of `run`, in the order of `--help`.
RUN = (
    VerbOption("script", "Python script or any program to run, or a job file (.yaml).", type=Path),
    VerbOption(
        "arguments", "Values of a job file's parameters, as lr=0.1; behind `--` the script's own arguments.", type=list
    ),
    VerbOption(
        "-m --module", "Run a module, as `python -m` does, in place of a script.", "MODULE", section="What runs"
    ),
    VerbOption(
        "--template", "Run a job file that the workspace keeps: `paceline template`.", "NAME", complete="templates"
    ),
    VerbOption(
        "-j --nodes",
        "N nodes of M processes each. M alone means 1xM; 2..4xM adapts to 2 to 4 available nodes. Default: 1x1.",
        "NxM",
    ),
    BACKEND,
    VerbOption(
        "--ps",
        "With --backend ps: number of processes that are parameter servers.",
        "N",
        int,
        key="parameter_server_count",
    ),
    VerbOption(
        "-e --experiment",
        "Experiment of the run; default: the name of the source folder.",
        "NAME",
        key="experiment",
        complete="experiments",
    ),
    NAME,
    VerbOption("--tag", "Tag; may be repeated.", "KEY[=VALUE]", list, complete="tags"),
    VerbOption("--source", "Folder to copy; default: the git repository, else the working directory.", "FOLDER", Path),
    VerbOption(
        "--link",
        "Folder with results of earlier runs that the script reads; may be repeated.",
        "FOLDER",
        list,
        key="link",
    ),
    VerbOption(
        "--send",
        "File or folder outside the copy to send to hosts that do not see it, of any size; may be repeated.",
        "PATH",
        list,
        key="send",
    ),
    VerbOption(
        "--compute",
        "Compute target; default: local.",
        "TARGET",
        key="compute_target",
        complete="targets",
        section="Where it runs",
    ),
    VerbOption("--gpu/--no-gpu", "One GPU for each process.", type=bool, key="use_gpu"),
    VerbOption(
        "--gpu-share",
        "Share of a GPU for each process, such as 0.5; other runs with a share use the rest. Default: 1.",
        "SHARE",
        key="gpu_share",
    ),
    VerbOption(
        "--cores",
        "Cores of this machine to reserve for each process. With 0 the run waits for no others. Default: 1.",
        "N",
        int,
        key="cores",
    ),
    VerbOption(
        "--priority",
        "Priority among waiting runs; urgent asks runs of a lower priority to leave. Default: normal.",
        "low|normal|high|urgent",
        key="priority",
        complete="priorities",
    ),
    VerbOption(
        "--gpu-visibility",
        "GPUs that a process sees: its own (worker), or all of its node (node). Default: worker.",
        "worker|node",
        key="gpu_visibility",
        complete="gpu_visibilities",
    ),
    VerbOption(
        "--env",
        "Variable for the workers; may be repeated. NAME alone takes the value from your shell without recording it.",
        "NAME[=VALUE]",
        list,
        complete="variables",
        section="Packages and environment",
    ),
    ENV_FILE,
    PYTHON,
    *PACKAGES,
    ISOLATED,
    VerbOption(
        "--environment",
        "Registered environment, see `paceline env list`.",
        "NAME",
        key="environment_definition",
        complete="environments",
    ),
    VerbOption("--image", "Run the workers in a container of this image.", "IMAGE", key="custom_docker_image"),
    VerbOption("--shm-size", "Size of the container's /dev/shm; default: the host's.", "SIZE", key="shm_size"),
    VerbOption(
        "--input",
        "Data for the script, in $PACELINE_INPUT_<NAME>; may be repeated. Add ,partition=rank or ,partition=node to split it.",
        "NAME=[STORE:]PATH",
        list,
        section="Data",
    ),
    VerbOption(
        "--output",
        "Folder $PACELINE_INPUT_<NAME> to store there at the end; may be repeated. Add ,overwrite to replace existing files.",
        "NAME=STORE:PATH",
        list,
        key="outputs",
    ),
    VerbOption(
        "--max-duration",
        "End the run as failed after this time, such as 90s or 1h30m.",
        type=Duration(),
        key="max_run_duration_seconds",
        section="Limits, restarts and messages",
    ),
    VerbOption(
        "--grace",
        "Time between SIGTERM and SIGKILL at the end of a run; default: 30s.",
        type=Duration(),
        key="grace_period_seconds",
    ),
    VerbOption(
        "--max-restarts",
        "Most restarts after a lost node or worker, or a port in use; a preemption is no restart.",
        "N",
        int,
        key="max_restarts",
    ),
    VerbOption(
        "--on-failure",
        "Workers to start again after the loss of a worker: all, or only lost ones if the script allows it. Default: restart.",
        "restart|replace",
        key="on_failure",
        complete="on_failure",
    ),
    VerbOption(
        "--restart-on-exception/--no-restart-on-exception",
        "Restart after the script's own exceptions, too.",
        type=bool,
        key="restart_on_exception",
    ),
    VerbOption(
        "--hang-after",
        "Time without output, metrics or progress until the run counts as hanging and gets a report; 0: never. Default: 10m.",
        type=Duration(),
        key="hang_seconds",
    ),
    VerbOption(
        "--on-hang",
        "Reaction to a hanging run. Default: report.",
        "report|fail|restart",
        key="on_hang",
        complete="on_hang",
    ),
    VerbOption(
        "--warm",
        "Keep the script's libraries loaded on each node for the next attempt. Default: auto.",
        "auto|off",
        key="warm",
        complete="warm",
    ),
    VerbOption(
        "--elastic-after",
        "With -j 2..4xM: least time between two stops at a checkpoint to add nodes. Default: 5m.",
        type=Duration(),
        key="elastic_seconds",
    ),
    VerbOption(
        "--log-limit", "Most bytes to keep of each worker's log, such as 500MB; 0: all.", "SIZE", key="log_limit"
    ),
    VerbOption(
        "--notify",
        "Receiver of messages about the run: mail:ADDRESS, command:WORDS, or slack:, teams:, webhook:, "
        "ntfy:, apprise: and the place of a URL, such as env:SLACK_URL; may be repeated.",
        "RECEIVER",
        list,
        key="notify",
    ),
    VerbOption(
        "--notify-on",
        "Event that sends a message, or a condition such as 'metrics.loss > 10'; may be repeated. Default: end and hang.",
        "|".join(EVENTS),
        list,
        key="notify_on",
        complete="notify_on",
    ),
    VerbOption(
        "--dry-run",
        "Print the job, its commands and environment, and start nothing.",
        type=bool,
        section="What is printed",
    ),
    VerbOption("--yaml", "With --dry-run: print the job as a file for `paceline run`.", type=bool),
    JSON,
    QUIET,
)
RERUN = (
    VerbOption(
        "run_id",
        "Run: its id, the beginning of it, or its name; of a model, NAME:VERSION or NAME@ALIAS, the run that made it.",
        "RUN",
        complete="run_ids",
        needed=True,
    ),
    VerbOption(
        "--set",
        "Option of the script with another value, such as lr=0.1; of a switch, true or false; may be repeated.",
        "NAME=VALUE",
        list,
        section="Changes",
    ),
    VerbOption("--unset", "Option of the script to leave out; may be repeated.", "NAME", list),
    VerbOption("--compute", "Another compute target.", "TARGET", key="compute_target", complete="targets"),
    VerbOption("-j --nodes", "N nodes of M processes each, as for `run`.", "NxM"),
    BACKEND,
    VerbOption("--resume", "Start from the checkpoints of the run.", type=bool),
    NAME,
    ENV_FILE,
    DETACH,
    JSON,
    QUIET,
)


def words(given: Given) -> tuple[Path | None, dict[str, Any]]:
    """Return the job file's path, or None, and the job's settings from the other options.

    `given` maps options to values, and absent options to None. Paths become absolute: a job file may store them.
    """
    entry = given["script"], given["source"], given["module"], given["arguments"] or []
    file, found = _entry(*entry) if given.get("template") is None else _template(given)
    if given["nodes"] is not None:
        found["node_count"], found["process_count_per_node"] = nodes_of(given["nodes"])
    found |= _environment(given["env"])
    plain = {option.key: given[option.name] for option in RUN if option.key} | {
        **{name: [os.path.abspath(path) for path in given[name] or ()] for name in ("link", "send")},
        "pip_requirements_file": one_file(given["requirements"]),
        "layered": None if given["isolated"] is None else not given["isolated"],
        "env_file": [os.path.abspath(os.path.expanduser(path)) for path in given["env_file"] or ()],
        "tags": pairs("--tag", given["tag"]),
        "inputs": _inputs(given["input"]),
    }
    # Keep 0 and False, because the user has given these values. An option that was not given has the value None.
    return file, found | {key: value for key, value in plain.items() if value not in (None, [], {})}


def one_file(requirements: list[str] | None) -> str | None:
    """Return the requirements file, or None without one. Raise JobError for several."""
    if requirements and len(requirements) > 1:
        raise JobError(
            f"--requirements was given {len(requirements)} times ({', '.join(requirements)}). Give one file, which may "
            "include others by lines such as: -r other.txt."
        )
    return requirements[0] if requirements else None


def pairs(option: str, given: list[str] | None) -> dict[str, Any]:
    """Return `KEY=VALUE` words as a dict. Without "=" the value is None."""
    found: dict[str, Any] = {}
    for word in given or ():
        key, equals, value = word.partition("=")
        if not key:
            raise JobError(f"{option} {word!r} is not KEY or KEY=VALUE.")
        found[key] = value if equals else None
    return found


def _entry(
    script: Path | None, source: Path | None, module: str | None, arguments: list[str]
) -> tuple[Path | None, dict[str, Any]]:
    found: dict[str, Any] = {}
    if module is not None:
        # click takes the first word as the script, even if the word is behind `--` and is an argument of the module.
        if script is not None and script.suffix == ".py" and script.is_file() and "--" not in sys.argv:
            raise JobError(
                f"{str(script)!r} and -m {module}: only one can run. Leave one out, or put the module's arguments behind `--`."
            )
        # With -m there is no script, so this word is an argument of the module.
        arguments = [*([str(script)] if script is not None else []), *arguments]
        found = {**_project(None, source), "entry_module": module}
        # In a working directory above the source folder, Python would not find the source folder's modules.
        if source is not None and found["working_directory"].split(os.sep)[0] == "..":
            found["working_directory"] = "."
    if arguments:
        found["arguments"] = arguments
    if module is not None:
        return None, found
    if script is None:
        raise JobError(
            "name what to run: a script (paceline run train.py), a module (paceline run -m package.train) or a job file "
            "(paceline run job.yaml)."
        )
    if script.suffix not in (".yaml", ".yml") and (command := _command(script, len(arguments))) is not None:
        place = _project(None, source)
        return None, found | place | _of_command(command, place["source_directory"])
    if not script.is_file():
        # A name without a slash may be a program of the target machine, such as nvidia-smi.
        is_name = len(script.parts) == 1 and script.suffix not in (".py", ".yaml", ".yml")
        if script.is_dir() and not (is_name and shutil.which(script.name)):
            raise JobError(f"{str(script)!r} is a folder. Name the Python file in it that is to run.")
        if is_name:
            return None, _project(None, source) | {"entry_script": script.name, **found}
        raise JobError(f"there is no script {str(script)!r} here ({Path.cwd()}). Give the path of a Python file.")
    # The job file names its source folder, so don't search for the folder of a project.
    if script.suffix in (".yaml", ".yml"):
        return script.absolute(), _for_file(str(script), source, arguments)
    place = _project(script, source)
    name = os.path.relpath(os.path.realpath(script), place["source_directory"])
    if name.split(os.sep)[0] == "..":
        raise JobError(f"{str(script)!r} is outside of --source {str(source)!r}. Name a folder that holds the script.")
    return None, found | place | {"entry_script": _file_name(name)}


def _template(given: Given) -> tuple[Path, dict[str, Any]]:
    from paceline.job.template import Templates
    from paceline.workspace_dir import configured

    name, script = given["template"], given["script"]
    if given["module"] is not None or (script is not None and script.suffix in (".yaml", ".yml")):
        other = script if given["module"] is None else f"-m {given['module']}"
        raise JobError(f"--template {name} and {other}: only one can run. Leave one out.")
    found = Templates(Path(os.path.abspath(configured().expanduser()))).find(name)
    # With a job file or template there is no script. This word is a parameter's value, or an argument behind `--`.
    words = [*([str(script)] if script is not None else []), *(given["arguments"] or [])]
    return found.path, {**_for_file(f"--template {name}", given["source"], words), "text": found.text}


def _for_file(file: str, source: Path | None, words: list[str]) -> dict[str, Any]:
    parameters, arguments = values_and_arguments(file, words)
    found: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if arguments:
        found["arguments"] = arguments
    return found | ({"source_directory": str(source.absolute())} if source is not None else {})


def values_and_arguments(file: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words after a job file into parameter values and script arguments."""
    # click removes the `--`, so read from the command line which words came after it.
    behind = len(sys.argv) - sys.argv.index("--") - 1 if "--" in sys.argv else 0
    count = max(0, len(words) - behind)
    parameters: dict[str, str] = {}
    for word in words[:count]:
        name, equals, value = word.partition("=")
        if name in parameters:
            raise JobError(f"{word!r}: {name} has the value {parameters[name]!r} already. Give one value.")
        parameters[name] = value
        if not (name and equals):
            raise JobError(
                f"{word!r} behind {file} is not NAME=VALUE, a value of a parameter. Put arguments of the script behind `--`."
            )
    return parameters, words[count:]


def _project(script: Path | None, source: Path | None) -> dict[str, str]:
    """Return the job's `source_directory`, and `working_directory` relative to that folder.

    The source directory is `source`. By default it is the git repository of the script or, without a script, of the
    working directory. Outside a repository it is the working directory or, for a script elsewhere, the script's folder.
    """
    here = os.getcwd()
    folder = os.path.dirname(os.path.realpath(script)) if script is not None else here
    if source is not None:
        root = os.path.realpath(source)
    else:
        root = _repository(folder) or (here if f"{folder}/".startswith(f"{here.rstrip('/')}/") else folder)
    return {"source_directory": root, "working_directory": os.path.relpath(here, root)}


def _repository(folder: str) -> str | None:
    home = os.path.realpath(os.path.expanduser("~"))
    start = folder
    # Ignore a git repository in the home folder, because it may hold the user's settings instead of a project.
    while folder not in ("/", home) or folder == start != "/":
        if os.path.exists(os.path.join(folder, ".git")):
            return folder
        folder = os.path.dirname(folder)
    return None


def _file_name(name: str) -> str:
    """Return a source file's name, with "./" unless it has "/" or ends with ".py"."""
    return name if "/" in name or name.endswith(".py") else f"./{name}"


def _command(first: Path, further: int) -> list[str] | None:
    """Return the words after `--` if no script precedes them, else None.

    `first` is the word that the parser took for the script. `further` is the number of words after `first`.
    """
    # click removes the `--`, so read from the command line which words came after it.
    behind = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    return behind if len(behind) == 1 + further and Path(behind[0]) == first else None


def _of_command(command: list[str], root: str) -> dict[str, Any]:
    first = command[0]
    if len(command) == 1 and re.search(r"[\s;|&<>$]", first):
        return {"entry_script": "bash", "arguments": ["-c", first]}
    is_file = "/" in first or os.path.isfile(first)
    name = os.path.relpath(os.path.realpath(first), root) if is_file else first
    if os.path.isabs(first) or name.split(os.sep)[0] == "..":
        # The program is outside of the source folder, so it is not copied. Run the program by its path on the target machine.
        return {"entry_script": "bash", "arguments": ["-c", f"exec {shlex.join(command)}"]}
    return {"entry_script": _file_name(name) if is_file else first, "arguments": command[1:]}


def _inputs(given: list[str] | None) -> list[str]:
    if not given:
        return []
    from paceline.job_files.data_words import absolute_word

    return [absolute_word("--input", word) for word in given]


def _environment(given: list[str] | None) -> dict[str, Any]:
    variables: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for name, value in pairs("--env", given).items():
        if value is None:
            secrets[name] = f"env:{name}"
        else:
            variables[name] = value
    return {key: value for key, value in (("environment_variables", variables), ("secrets", secrets)) if value}


def nodes_of(text: str) -> tuple[int | str, int]:
    """Return the number or range ("2..4") of nodes, and the processes of each node."""
    match = re.fullmatch(r"(?:(\d+)(?:\.\.(\d+))?x)?(\d+)", text)
    if match is None and (ends := re.fullmatch(r"(\d+)\.\.(\d+)", text)):
        fewest, most = sorted(max(1, int(end)) for end in ends.groups())
        raise JobError(
            f"-j {text!r} lacks the number of processes a node. Write -j {fewest}..{most}x1 for one process."
        )
    least, most = (int(match[1] or 1), int(match[2] or match[1] or 1)) if match else (0, 0)
    if match is None or most < 1 or int(match[3]) < 1:
        raise JobError(
            f"-j {text!r} is not NxM. Write 2x4 for two nodes of four processes each, 4 for one node of four, or 2..4x2 for "
            "two to four nodes of two."
        )
    if least < 1:
        raise JobError(f"-j {text!r}: a run has at least one node. Write -j 1..{most}x{match[3]}.")
    if least > most:
        raise JobError(f"-j {text!r}: the fewest nodes come first. Write -j {most}..{least}x{match[3]}.")
    return (least if least == most else f"{least}..{most}"), int(match[3])
