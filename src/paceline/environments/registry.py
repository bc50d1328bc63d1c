"""The registered environments of a workspace, each with its versions.

<workspace>/environments/registered/<name>/<version>.json
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from paceline.errors import EnvironmentSpecError
from paceline.job.environment import Spec
from paceline.job.environment_rules import NAME, check_name
from paceline.job.secret_values import looks_secret
from paceline.system.names import did_you_mean
from paceline.system.registry import Versions


def register(environment: Spec, workspace_dir: Path) -> Spec:
    """Register an environment in a workspace. Return it with its version.

    If the latest version is equal to `environment`, no new version is made.

    Raises:
        EnvironmentSpecError: The environment has no name, a variable looks like a secret, or the disk can't be written.
    """
    name = environment.name
    if name is None:
        raise EnvironmentSpecError("this environment has no name to be registered under. Make it with name='...'.")
    variables = environment.environment_variables
    if secrets := [variable for variable, value in variables.items() if looks_secret(variable, value)]:
        raise EnvironmentSpecError(
            f"environment {name!r} has a value for {secrets[0]}, which looks like a secret, and registering would write it down. "
            f'Leave it out and give it to each run: pl.secret("{secrets[0]}") in environment_variables, or --env {secrets[0]}.'
        )
    registry = _registry(workspace_dir)
    try:
        with registry.locked():
            if known := registry.versions(name):
                latest = _load(type(environment), registry, name, known[-1])
                # Compare without the version, which `registry.add` assigns.
                if replace(latest, version=None) == replace(environment, version=None):
                    return latest
            version = registry.add(name, lambda version: replace(environment, version=version).to_json())
    except OSError as error:
        raise EnvironmentSpecError(
            f"environment {name!r} could not be registered: {error.strerror}: {error.filename!r}."
        ) from error
    return replace(environment, version=version)


def get(kind: type[Spec], workspace_dir: Path, name: str, version: int | None = None) -> Spec:
    """Return a registered environment, by default its latest version.

    The result is an instance of the class `kind`.

    Raises:
        EnvironmentSpecError: The environment does not exist. The message lists the existing environments.
    """
    check_name(name)
    registry = _registry(workspace_dir)
    versions = registry.versions(name)
    if not versions:
        known = ", ".join(registry.names()) or "none"
        raise EnvironmentSpecError(
            f"no environment {name!r} is registered in {str(workspace_dir)!r}.{did_you_mean(name, registry.names())} "
            f"There are: {known}. `paceline env build --name {name} ...` registers one."
        )
    if version is not None and version not in versions:
        known = ", ".join(map(str, versions))
        raise EnvironmentSpecError(f"environment {name!r} has no version {version!r}. It has: {known}.")
    return _load(kind, registry, name, versions[-1] if version is None else version)


def all_latest(kind: type[Spec], workspace_dir: Path) -> dict[str, Spec]:
    """Return the latest version of each registered environment, sorted by name."""
    return {name: get(kind, workspace_dir, name) for name in _registry(workspace_dir).names()}


def existing(python: str | os.PathLike[str]) -> str:
    """Return the absolute path of an interpreter.

    Raises:
        EnvironmentSpecError: The interpreter does not exist.
    """
    path = Path(os.path.abspath(os.path.expanduser(python)))
    if path.is_dir():
        for name in ("bin/python", "bin/python3"):
            if os.access(path / name, os.X_OK):
                return str(path / name)
        raise EnvironmentSpecError(
            f"there is no bin/python in {str(path)!r}. Give the folder of a venv or conda environment, or an interpreter, "
            f"such as {sys.executable!r}."
        )
    if not path.is_file() or not os.access(path, os.X_OK):
        raise EnvironmentSpecError(
            f"python={os.fspath(python)!r} is not an interpreter: {'not executable' if path.is_file() else 'no such file'}. "
            f"Give an interpreter's path, such as {sys.executable!r}."
        )
    return str(path)


def _registry(workspace_dir: Path) -> Versions:
    return Versions(workspace_dir / "environments" / "registered", NAME)


def _load(kind: type[Spec], registry: Versions, name: str, version: int) -> Spec:
    data = registry.read(name, version)
    if not isinstance(data, dict):
        path = registry.of(name).path(str(version))
        raise EnvironmentSpecError(f"{str(path)!r} is not a registered environment any more. Remove the file.")
    return kind.from_json(data)
