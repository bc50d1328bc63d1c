"""Descriptions of jobs: an estimator's parameters by name, with values as in a job file.

    command line ── run_options.words ──┐
                                        ├── combined ── asked ── job, source, experiment, ...
    job.yaml ── job_file.read ──────────┘       └────── job_file.text ── job.yaml

A description holds only explicit values; the job adds defaults. Its paths are absolute.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.environments import registry
from paceline.environments.environment import Environment
from paceline.environments.from_parameters import described
from paceline.errors import JobError
from paceline.estimator import interpreter, log_limit, sent_names
from paceline.job.environment import EnvironmentSpec
from paceline.job.job import Job
from paceline.job.sizes import node_range, range_text
from paceline.job_files.data_words import data_words
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_experiment_name, experiment_name
from paceline.runs.tags_and_properties import check_display_name
from paceline.submit import SourceCopy, check, check_source, submit
from paceline.workspace_dir import configured


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A job and the settings of its submission, such as source and tags.

    Attributes:
        values: The values of secrets that come from dotenv files, by name.
        leave_out: Files that contain secrets, so snapshots leave them out.
        link: Folders in the source with results of earlier runs that the run must see, as relative paths.
    """

    job: Job
    directory: Path
    experiment: str
    tags: dict[str, Any]
    display_name: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    leave_out: tuple[Path, ...] = ()
    link: frozenset[str] = frozenset()

    @property
    def source(self) -> SourceCopy:
        return SourceCopy(directory=self.directory.absolute(), link=self.link)

    @property
    def jobs(self) -> tuple[Job, ...]:
        return (self.job,)

    def check(self, workspace_dir: Path) -> None:
        """Raise UserError if checks show that the job would fail."""
        check_source(self.job, self.directory, workspace_dir)
        check(self.job, workspace_dir)

    def submit(
        self, workspace_dir: Path, *, progress: Callable[[int, int], None] | None = None, run_id: str | None = None
    ) -> RunFolder:
        """Submit the job and return the run's folder."""
        return submit(
            self.job,
            self.source,
            workspace_dir,
            self.experiment,
            tags=self.tags,
            progress=progress,
            display_name=self.display_name,
            values=self.values,
            leave_out=self.leave_out,
            run_id=run_id,
        )


def combined(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two job descriptions. `above` has priority. Variables and tags are merged by name."""
    found = {**below, **above}
    for key in ("environment_variables", "secrets", "tags"):
        if key in below and key in above:
            found[key] = {**below[key], **above[key]}
    # A name can't be both a variable and a secret: `above`, the description with priority, decides which it is.
    for key, other in (("environment_variables", "secrets"), ("secrets", "environment_variables")):
        if key in above and other in below:
            found[other] = {name: value for name, value in found[other].items() if name not in above[key]}
    # An option replaces its counterpart in the job file: -m replaces a script, and -j replaces a number of workers.
    for key, others in (
        ("entry_module", ("entry_script",)),
        ("entry_script", ("entry_module",)),
        ("process_count_per_node", ("worker_count",)),
    ):
        if key in above:
            for other in others:
                if other not in above:
                    found.pop(other, None)
    return found


def whole(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job description with absolute paths of requirements files and interpreter."""
    found = dict(description)
    for key in ("pip_requirements_file", "conda_dependencies_file"):
        if key in found:
            # A job file's paths are relative to the source folder, and a command line's perhaps to the working directory. Use the
            # source folder if the file exists in it.
            beside = os.path.join(found.get("source_directory", "."), found[key])
            found[key] = os.path.abspath(beside if os.path.isfile(beside) else found[key])
    # Keep a name without a slash: it is looked up on the PATH of the user who runs the file.
    if os.sep in found.get("python", ""):
        found["python"] = os.path.abspath(os.path.expanduser(found["python"]))
    return found


def asked(description: Mapping[str, Any], workspace_dir: Path | None = None) -> Asked:
    """Build a job and its submission settings from a job description.

    `workspace_dir` is the workspace with the registered environments, by default the configured workspace.
    """
    # Check the display name here too, because a dry run does not submit the job, and submission checks the name.
    check_display_name(description.get("display_name"))
    directory = Path(description.get("source_directory") or Path.cwd())
    backend = description.get("distributed_backend")
    environment = _environment(description, directory, workspace_dir)
    # Refuse these values before the job does, because the job's messages name parameters and not command line options.
    wanting = {"--restart-on-exception": description.get("restart_on_exception")}
    wanting["--on-failure replace"] = description.get("on_failure") == "replace"
    wanting["--on-hang restart"] = description.get("on_hang") == "restart"
    for option in (name for name, is_set in wanting.items() if is_set and not description.get("max_restarts")):
        raise JobError(f"{option} without --max-restarts: say how often, such as --max-restarts 3.")
    if description.get("notify_on") and not description.get("notify"):
        raise JobError("--notify-on without --notify: name a receiver, such as --notify mail:ann@example.com.")
    files = tuple(map(Path, description.get("env_file") or ()))
    values, from_shell = read_env_files(files)
    recorded, named = description.get("environment_variables", {}), description.get("secrets", {})
    # If the description has the variable, as a value or a secret, ignore the variable in the dotenv files.
    in_files = [name for name in (*values, *from_shell) if name not in recorded and name not in named]
    secrets = {**{name: f"env:{name}" for name in in_files}, **named}
    # A secret of the job replaces the environment's variable of the same name.
    variables = {name: value for name, value in environment.environment_variables.items() if name not in secrets}
    given: dict[str, Any] = {
        name: description[name]
        for name in (
            *("entry_script", "entry_module", "working_directory", "compute_target", "use_gpu", "gpu_visibility"),
            *("priority", "cores", "max_restarts", "max_run_duration_seconds", "grace_period_seconds", "on_failure"),
            *("restart_on_exception", "hang_seconds", "on_hang", "warm", "elastic_seconds"),
        )
        if name in description
    }
    if "gpu_share" in description:
        with contextlib.suppress(ValueError):  # the job refuses a word that is no number, and reports it
            given["gpu_share"] = description["gpu_share"]
            given["gpu_share"] = float(description["gpu_share"])
    if "log_limit" in description:
        given["log_limit"] = log_limit(description["log_limit"])
    for name in ("notify", "notify_on"):
        if description.get(name):
            given[name] = tuple(description[name])
    job = Job(
        **{"entry_script": "", **given},
        **_counts(description, backend),
        arguments=tuple(description.get("arguments") or ()),
        distributed_backend=backend,
        environment=environment,
        environment_variables={**variables, **recorded},
        secrets=secrets,
        inputs=data_words(description.get("inputs"), description.get("outputs")),
        send=sent_names(description.get("send"), directory),
    )
    return Asked(
        job=job,
        directory=directory,
        experiment=check_experiment_name(description.get("experiment", experiment_name(directory))),
        tags=dict(description.get("tags") or {}),
        display_name=description.get("display_name"),
        values={name: value for name, value in values.items() if name in in_files},
        leave_out=(*files, *map(Path, description.get("leave_out") or ())),
        link=frozenset(_within(path, directory) for path in description.get("link") or ()),
    )


def _within(path: str, directory: Path) -> str:
    name = os.path.relpath(os.path.realpath(path), os.path.realpath(directory))
    if name.split(os.sep)[0] == ".." or not os.path.isdir(path):
        raise JobError(f"--link {path!r} is not a folder below {str(directory)!r}, the copied folder. Name one of it.")
    return name


def _counts(description: Mapping[str, Any], backend: str | None) -> dict[str, Any]:
    given, processes = description.get("node_count", 1), description.get("process_count_per_node", 1)
    least, nodes = node_range(given)
    servers = description.get("parameter_server_count", 0)
    # Messages name the option -j, because the user has probably given the numbers by this option.
    words = f"-j {processes}" if nodes == 1 else f"-j {range_text(least, nodes)}x{processes}"
    if backend is None and nodes * processes > 1:
        raise JobError(
            f"{words} makes {nodes * processes} processes. Say how they find each other: --backend mpi, gloo, nccl or tensorflow."
        )
    # A job file gives the numbers of workers and servers separately, while the number of -j is their sum.
    if "worker_count" in description:
        return {"node_count": given, "worker_count": description["worker_count"], "parameter_server_count": servers}
    if backend == "ps" and not 0 < servers < nodes * processes:
        raise JobError(
            f"--backend ps with {words} and --ps {servers}: of the {nodes * processes} processes, --ps says how many are "
            "parameter servers; at least one has to be, and one a worker."
        )
    if backend == "ps":
        return {"node_count": given, "worker_count": nodes * processes - servers, "parameter_server_count": servers}
    if servers:
        raise JobError(f"--ps {servers} belongs to --backend ps.")
    return {"node_count": given, "process_count_per_node": processes}


def _environment(description: Mapping[str, Any], directory: Path, workspace_dir: Path | None) -> EnvironmentSpec:
    packages = ("pip_packages", "pip_requirements_file", "conda_packages", "conda_dependencies_file")
    if description.get("layered") is False and not any(description.get(name) for name in packages):
        raise JobError("--isolated without packages: there would be no environment to isolate. Name some with --pip.")
    name, image, python = (description.get(key) for key in ("environment_definition", "custom_docker_image", "python"))
    folder = Path(os.path.abspath(workspace_dir or configured().expanduser())) if name else Path()
    return described(
        definition=registry.get(Environment, folder, name) if name else None,
        source_directory=directory,
        python=interpreter(python) if image is None else python,
        # By default, add the packages as a layer above the interpreter's packages, so that the script can import both.
        layered=description.get("layered", True),
        user_managed=False,
        pip_packages=description.get("pip_packages"),
        pip_requirements_file=description.get("pip_requirements_file"),
        conda_packages=description.get("conda_packages"),
        conda_channels=description.get("conda_channels"),
        conda_dependencies_file=description.get("conda_dependencies_file"),
        docker_image=image,
        shm_size=description.get("shm_size"),
    )


def read_env_files(paths: Sequence[Path]) -> tuple[dict[str, str], list[str]]:
    """Return the variables of dotenv files, and the names without a value.

    Later files have priority. A name without a value gets the value that it has in the submitting shell. Quotes, `export`,
    comments and multi-line values follow python-dotenv, but `${NAME}` is not expanded, because a password may contain it.
    """
    values: dict[str, str] = {}
    bare: dict[str, None] = {}
    for path in paths:
        for name, value in _lines(path):
            # If several lines set this name, the last one counts, even if it has no value.
            values.pop(name, None)
            bare.pop(name, None)
            if value is None:
                bare[name] = None
            else:
                values[name] = value
    return values, list(bare)


def _lines(path: Path) -> list[tuple[str, str | None]]:
    # Use python-dotenv's parser only: its reader expands `${NAME}` and skips lines that it can't parse.
    from dotenv.parser import parse_stream

    try:
        # Strip a UTF-8 BOM: it would become part of the first variable's name.
        with open(path, encoding="utf-8-sig") as file:
            bindings = list(parse_stream(file))
    except OSError as error:
        raise JobError(f"--env-file {str(path)!r} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise JobError(f"--env-file {str(path)!r} is not UTF-8. Save it as UTF-8.") from None
    found = []
    for binding in bindings:
        if binding.error:
            raise JobError(
                f"--env-file {str(path)!r}, line {binding.original.line}: this is not NAME=VALUE. Quote values with blanks or "
                "quotes in them, and begin comments with #."
            )
        # python-dotenv returns comments and empty lines as bindings without a name.
        if binding.key is not None:
            found.append((binding.key, binding.value))
    return found
