"""serve, package: serve a model in the foreground, try it, or package it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import service_options
from paceline.cli.common import print_json, refuse, warn
from paceline.cli.options import JSON, TLS, Duration, Given, VerbOption, takes
from paceline.cli.service_options import PACKAGE
from paceline.errors import ModelNotFoundError, ServingError
from paceline.job.environment import EnvironmentSpec
from paceline.launchers.environment import of_interpreter
from paceline.runs.visible import visible
from paceline.services.package.write import package as write_package
from paceline.services.revision_spec import FoundModel, check_environment, find_model, make_spec
from paceline.serving.api import ServedModel, ServerConfig, absolute, check
from paceline.system.detached_process import library_dir
from paceline.system.files import PRIVATE, write_json
from paceline.system.scratch import Scratch
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import WrittenFolder

#: Default port, which Azure's own inference server uses as well.
_PORT = 5001

SERVE = (
    VerbOption(
        "models",
        "Registered model, NAME, NAME:VERSION or NAME@ALIAS, or path of a file or folder (with a slash: ./model).",
        "[MODEL]...",
        list,
        complete="models",
    ),
    VerbOption("--entry", "Scoring script; default: serve the model without a script.", "SCRIPT"),
    VerbOption("--source", "Working directory of the script; default: the script's folder.", "FOLDER"),
    *service_options.RUNS_IN,
    VerbOption("--host", "Address to listen at; default: 127.0.0.1. Any other needs --keys.", "ADDRESS"),
    VerbOption("--port", f"Port; default: {_PORT}. 0 takes any free port.", "N", int),
    service_options.WORKERS,
    service_options.THREADS,
    *service_options.REQUESTS,
    service_options.MEMORY_LIMIT,
    VerbOption("--keys", 'File with the keys: {"primary": ..., "secondary": ...}.', "FILE"),
    *TLS,
    VerbOption("--drain", "Time for running requests at the end; default: 30s.", type=Duration()),
    VerbOption("--name", "Name of the service in its log and metrics; default: the model's.", "NAME"),
    VerbOption("--log-level", "Log level: debug, info, warning or error; default: info.", "LEVEL"),
    VerbOption(
        "--check",
        "Instead of serving, load the model, send it this sample, and report errors. A file with a request's body, or "
        "the body itself; '' for an empty one.",
        "SAMPLE",
        may_be_empty=True,
    ),
    JSON,
)

#: Options of `serve` that are keys of the server's configuration, but no settings of a service.
_KEYS = ("host", "workers", "log_level", "tls_cert", "tls_key")


@takes(*SERVE)
def serve(**given: Any) -> int:
    """Serve a model in the foreground.

    It answers /score, /v2/models/NAME/infer and /metrics; Ctrl-C ends it. Serves a script with init() and run(data), or
    predict(...) with type hints, or a plain model of scikit-learn, ONNX, TorchScript or torch.export.
    """
    with Scratch("serve", for_exec=True) as folder:
        alone = given["as_json"] and given["check"] is None
        refuse(ServingError, (alone, "--json goes with --check; a running server has /metrics and its log."))
        sample = _sample(given["check"] or "")
        found = _found(given["models"] or ())
        config = _config(given, [_served(model, folder / f"hashes-{at}") for at, model in enumerate(found)])
        with in_environment(config, given, found[0].environment if found else None) as config:
            if given["check"] is not None:
                return _check(config, sample, as_json=given["as_json"])
            path = folder / "config.json"
            # Let only this user read the file, because the configuration's environment variables may be secrets.
            write_json(path, config.to_json(), mode=PRIVATE)
            sys.stdout.flush()
            sys.stderr.flush()
            # Replace this process by the server, which frees the parser's memory. Start the server in a folder without Python
            # modules: such modules could replace modules of Paceline's library.
            os.chdir(folder)
            os.execv(sys.executable, [sys.executable, "-m", "paceline.serving", str(path)])


def _config(given: Given, models: Sequence[ServedModel]) -> ServerConfig:
    values: dict[str, Any] = {key: given[key] for key in _KEYS if given[key] is not None}
    values |= service_options.settings(given)
    if given["entry"] is not None:
        values |= _script(given["entry"], given["source"])
    elif given["source"] is not None:
        raise ServingError("--source goes with --entry, the script that runs in it.")
    elif not models:
        raise ServingError("there is nothing to serve. Name a model, or a script with --entry, or both.")
    config = ServerConfig(
        name=given["name"] or (models[0].name if models else Path(given["entry"]).stem),
        models=tuple(models),
        port=_PORT if given["port"] is None else given["port"],
        keys_file=given["keys"],
        is_temporary=True,
        **values,
    )
    return absolute(config, Path.cwd())


def _script(entry: str, source: str | None) -> dict[str, str]:
    path = Path(entry).absolute()
    if not path.is_file() and source is not None:
        path = Path(source).absolute() / entry
    if not path.is_file():
        raise ServingError(f"--entry {entry!r}: there is no such file.")
    base = path.parent if source is None else Path(source).absolute()
    if not path.is_relative_to(base):
        raise ServingError(f"--entry {entry!r} is not below --source {source!r}. Name the folder that holds it.")
    return {"entry_script": path.relative_to(base).as_posix(), "source_dir": str(base)}


def _found(references: Sequence[str]) -> list[FoundModel]:
    # Don't create the workspace, because a model in a folder can be served without a workspace.
    workspace_dir = Workspace.from_config(create=False).path
    found = []
    for reference in references:
        try:
            found.append(find_model(workspace_dir, reference))
        except ModelNotFoundError:
            # There is no registered model of this name. Try the word as a path without a slash.
            if not Path(reference).exists():
                raise
            found.append(find_model(workspace_dir, Path(reference)))
    return found


def _served(found: FoundModel, hashes: Path) -> ServedModel:
    if found.id is not None:
        hashes.write_text(found.hash_lines(), encoding="utf-8")
    return ServedModel(
        name=found.name,
        version=found.version,
        path=str(found.path),
        hashes=None if found.id is None else str(hashes),
        framework=found.framework if found.framework in ("sklearn", "onnx", "pytorch") else None,
    )


def _check(config: ServerConfig, sample: bytes | None, *, as_json: bool) -> int:
    found = check(config, sample)
    if as_json:
        print_json(vars(found))
        return 0 if found.problem is None else 1
    for line in found.log.splitlines():
        warn(f"  {line}")
    if found.problem is not None:
        print(visible(found.problem), file=sys.stderr)
        return 1
    print(f"{found.kind}: loaded in {found.load_s:.1f} s", end="")
    if found.status is not None:
        print(f"; the sample was answered {found.status} in {found.answer_s * 1000:.1f} ms:")
        print(visible(found.answer or "", lines=True), end="")
    print()
    return 0


def _sample(given: str) -> bytes | None:
    if not given:
        return None
    if given.lstrip()[:1] in ("{", "["):
        return given.encode()
    try:
        # Accept @FILE as well as FILE, as `service call` does.
        return Path(given.removeprefix("@")).read_bytes()
    except OSError as error:
        raise ServingError(f"--check {given!r}: the sample can't be read: {error.strerror}.") from error


@contextmanager
def in_environment(config: ServerConfig, given: Given, own: EnvironmentSpec | None) -> Iterator[ServerConfig]:
    """Yield the server's configuration `config`, with the environment in which it runs.

    By default this is `own`, the environment of the run that made the first model. `paceline env prune` does not remove it before
    this process ends, even if the process replaces itself by exec().
    """
    # `service_options.environment` searches for requirements files in the folder `source`.
    wanted = service_options.environment({**given, "source": config.source_dir})
    spec = wanted or own or EnvironmentSpec()
    variables = {**spec.environment_variables, **service_options.variables(given["env"])}
    check_environment(spec)
    if not spec.needs_build:
        yield replace(config, python=_interpreter(spec.python), environment=variables)
        return
    from paceline.environments.store import EnvironmentStore
    from paceline.services.prepare import prepare

    workspace_dir = Workspace.from_config().path
    built, setup = prepare(workspace_dir, spec, warn)
    with EnvironmentStore(workspace_dir / "environments").hold(built) as lock:
        os.set_inheritable(lock, True)
        shell = of_interpreter(setup, variables, library_dir(workspace_dir), os.environ)
        yield replace(config, python=setup.python, environment={**shell, **variables})


def _interpreter(python: str | None) -> str | None:
    if python is None or python == sys.executable:
        return None
    if not Path(python).exists():
        raise ServingError(
            f"the model was made by the interpreter {python!r}, which is not there. Name another one with --python, or the "
            "packages that it needs with --pip."
        )
    return python


@takes(*PACKAGE)
def package(**given: Any) -> None:
    """Write a folder that serves a model anywhere. It has a Dockerfile, exact versions, model, script and server."""
    spec = make_spec(
        given["models"],
        entry_script=given["entry"],
        source_directory=given["source"],
        environment=service_options.environment(given),
        environment_variables=service_options.variables(given["env"]),
        settings=service_options.settings(given),
    )
    folder = write_package(
        Workspace.from_config(create=False).path,
        spec,
        Path(given["out"]),
        name=given["name"],
        workers=1 if given["workers"] is None else given["workers"],
        base=given["base"],
        overwrite=given["overwrite"],
    )
    if given["as_json"]:
        written: WrittenFolder = {"folder": str(folder), "files": sorted(path.name for path in folder.iterdir())}
        print_json(written)
        return
    print(folder)
    warn(f"podman build -t {folder.name.lower()} {folder}\nor, by hand: python {folder / 'start.py'} --port 8000")
