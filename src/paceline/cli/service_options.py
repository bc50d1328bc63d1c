"""Options of `service deploy` and `service update`, and the settings that they make."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.common import refuse
from paceline.cli.options import JSON, TLS, Duration, Given, VerbOption
from paceline.cli.run_options import ISOLATED, PACKAGES, PYTHON, one_file
from paceline.environments.environment import Environment
from paceline.environments.from_parameters import described
from paceline.errors import ServiceError
from paceline.estimator import interpreter
from paceline.job.environment import EnvironmentSpec
from paceline.system import units
from paceline.workspace import Workspace

#: Option -> the field in `paceline.services.record.ServingOptions` that the option sets.
_SETTINGS = {
    "max_batch": "max_batch",
    "max_queue": "max_queue",
    "max_body": "max_body_bytes",
    "timeout": "timeout_s",
    "load_timeout": "load_timeout_s",
    "memory_limit": "memory_limit_bytes",
    "drain": "drain_s",
    "threads": "threads",
    "allow_origin": "allow_origins",
}
_SIZES = ("max_body", "memory_limit")

#: Options that `service` and `serve` share: the environment of the script, and the limits of a request.
RUNS_IN = (
    VerbOption(
        "--environment", "Registered environment; default: the environment of the run that made the model.", "NAME"
    ),
    *PACKAGES,
    PYTHON,
    ISOLATED,
    VerbOption(
        "--env",
        "Variable for the script; may be repeated. NAME alone takes the value from your shell.",
        "NAME[=VALUE]",
        list,
    ),
)
WORKERS = VerbOption("--workers", "Model processes; default: 1.", "N", int)
REQUESTS = (
    VerbOption("--max-batch", "Most requests in a batch, if the model takes batches; default: 16.", "N", int),
    VerbOption("--max-queue", "Most waiting requests; further ones get 503. Default: 256.", "N", int),
    VerbOption("--max-body", "Largest request, such as 10MB; default: 64MiB.", "SIZE"),
    VerbOption(
        "--allow-origin",
        "Origin of web pages that may send requests (CORS), such as https://app.example; may be repeated. '*': all.",
        "ORIGIN",
        list,
    ),
    VerbOption("--timeout", "Time for the model's answer, then 504; default: 60s.", type=Duration()),
)
MEMORY_LIMIT = VerbOption(
    "--memory-limit", "Memory limit of a model process, such as 2GB. Beyond it the process is replaced.", "SIZE"
)
THREADS = VerbOption("--threads", "Threads of a model process; default: the cores divided by the workers.", "N", int)

SERVICE_NAME = VerbOption("service", "Name of the service.", "NAME", complete="services", needed=True)
_WHAT = (
    VerbOption(
        "--model -m",
        "Registered model, NAME:VERSION or NAME@ALIAS, or path of a file or folder; may be repeated.",
        "MODEL",
        list,
    ),
    VerbOption(
        "--entry", "Scoring script, with init() and run(); default: serve the model without a script.", "SCRIPT", str
    ),
    VerbOption("--source", "Folder to copy; default: the script's. The script runs in a copy of it.", "FOLDER"),
    *RUNS_IN,
    WORKERS,
    *REQUESTS,
    VerbOption("--load-timeout", "Time for init(); default: 10m.", type=Duration()),
    MEMORY_LIMIT,
    VerbOption("--drain", "Time for running requests when the service ends; default: 30s.", type=Duration()),
    THREADS,
    VerbOption("--no-wait", "Return at once.", type=bool),
    JSON,
)

UPDATE = (SERVICE_NAME, *_WHAT)
DEPLOY = (
    VerbOption("service", "Name of the service: 3 to 32 of a-z, 0-9 and -.", "NAME", needed=True),
    *_WHAT[:-2],
    VerbOption(
        "--host", "Address to listen at; default: 127.0.0.1. 0.0.0.0: all addresses of this machine.", "ADDRESS"
    ),
    VerbOption("--port", "Port; default: a free one, which the service keeps.", "N", int),
    VerbOption("--auth/--no-auth", "Require a key; default: if other machines can reach the service.", type=bool),
    *TLS,
    VerbOption("--compute", "Compute target; default: local.", "TARGET", complete="targets"),
    VerbOption("--tag", "Tag; may be repeated.", "KEY=VALUE", list),
    VerbOption("--overwrite", "Replace a service of this name.", type=bool),
    VerbOption(
        "--notify", "Receiver of a message when the service is down, as of `run`; may be repeated.", "RECEIVER", list
    ),
    *_WHAT[-2:],
)

_OF_A_REVISION = tuple(option for option in _WHAT if option.name not in ("model", "no_wait", "as_json"))
PACKAGE = (
    VerbOption(
        "models", "Registered model, NAME:VERSION or NAME@ALIAS, or path of a file or folder.", "MODEL...", list
    ),
    VerbOption("--out -o", "Folder to write, which must not exist.", "FOLDER", needed=True),
    VerbOption("--name", "Name of the service; default: the model's.", "NAME"),
    VerbOption("--base", "Base image; default: python, in the version that made the model.", "IMAGE"),
    *_OF_A_REVISION,
    VerbOption("--overwrite", "Replace a folder that this command has written.", type=bool),
    JSON,
)


def settings(given: Given) -> dict[str, Any]:
    """Return the settings that options contain, for a service or for `paceline serve`."""
    found: dict[str, Any] = {}
    for option, name in _SETTINGS.items():
        value = given.get(option)
        if value is None or value == []:
            continue
        if option in _SIZES:
            try:
                value = units.size_bytes(value)
            except ValueError as error:
                raise ServiceError(f"--{option.replace('_', '-')}: {error}") from None
        found[name] = value
    return found


def variables(words: Sequence[str] | None) -> dict[str, str]:
    """Return the variables of NAME=VALUE words. A NAME alone takes the shell's value."""
    from paceline.services.revision_spec import as_variables

    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals:
            if name not in os.environ:
                raise ServiceError(f"--env {name}: the shell has no such variable. Write --env {name}=VALUE.")
            value = os.environ[name]
        found[name] = value
    return as_variables(found)


def environment(given: Given) -> EnvironmentSpec | None:
    """Return the environment that the options describe, or None without such options."""
    name, isolated = given["environment"], given["isolated"] is not None
    own = given["python"] is not None or any(given[option.name] for option in PACKAGES)
    refuse(
        ServiceError,
        (name and (own or isolated), f"--environment {name} has packages. Leave out it, or packages and --python."),
        (isolated and not own, "--isolated and --layered are for packages. Name some with --pip or --requirements."),
    )
    if name is not None:
        return Environment.get(Workspace.from_config(create=False), name)
    return environment_of(given, Path(given["source"] or Path.cwd())) if own else None


def tags(words: Sequence[str] | None) -> dict[str, str]:
    """Return the tags of KEY=VALUE words as a dict."""
    return {key: value for key, _, value in (word.partition("=") for word in words or ())}


def tls(given: Given) -> tuple[str, str] | None:
    """Return the files of certificate and key, or None without TLS."""
    cert, key = given["tls_cert"], given["tls_key"]
    if (cert is None) != (key is None):
        raise ServiceError("--tls-cert and --tls-key go together: give both files, or neither.")
    return None if cert is None else (cert, key)


def environment_of(given: Given, source_directory: Path) -> EnvironmentSpec:
    """Return the environment that options such as `--pip` describe. Relative paths start from `source_directory`."""
    return described(
        definition=None,
        source_directory=source_directory,
        python=interpreter(given["python"]),
        layered=not given["isolated"],
        user_managed=False,
        pip_packages=given["pip"],
        pip_requirements_file=one_file(given["requirements"]),
        conda_packages=given["conda"],
        conda_channels=given["channel"],
        conda_dependencies_file=given["conda_file"],
        docker_image=None,
        shm_size=None,
    )
