"""Environments under a name, in versions: `<workspace>/environments/registered/<name>/<version>.json`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.environments.check import check_name
from paceline.errors import EnvironmentSpecError
from paceline.job.environment import Environment
from paceline.system.files import read_json, write_whole

_FOLDER = Path("environments") / "registered"


def register(environment: Environment, workspace: Any) -> Environment:
    """The environment with the version under which it now is registered; the latest one's where that is the same.

    Raises:
        EnvironmentSpecError: it has no name, or nothing can be written there.
    """
    import json

    if environment.name is None:
        raise EnvironmentSpecError("this environment has no name to be registered under. Make it with name='...'.")
    folder = Path(workspace.path) / _FOLDER / environment.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            latest = max(_versions(folder), default=0)
            if latest:
                known = _load(folder, latest)
                if replace(known, version=None) == replace(environment, version=None):
                    return known
            made = replace(environment, version=latest + 1)
            # Written beside and linked to its name: of two processes one gets the version, the other looks again.
            beside = folder / f".{os.getpid()}.{latest + 1}"
            write_whole(beside, json.dumps(made.to_json(), indent=1) + "\n", sync=True)
            try:
                os.link(beside, folder / f"{latest + 1}.json")
                return made
            except FileExistsError:
                continue
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentSpecError(
            f"environment {environment.name!r} could not be registered: {error.strerror}: {error.filename!r}."
        ) from error


def get(workspace: Any, name: str, version: int | None = None) -> Environment:
    """The registered environment; the latest version where none is given.

    Raises:
        EnvironmentSpecError: there is none; those that there are, are named.
    """
    check_name(name)
    folder = Path(workspace.path) / _FOLDER / name
    versions = _versions(folder)
    if not versions:
        known = ", ".join(_names(workspace)) or "none"
        raise EnvironmentSpecError(
            f"no environment {name!r} is registered in {str(workspace.path)!r}; there are: {known}."
        )
    if version is None:
        return _load(folder, max(versions))
    if version not in versions:
        known = ", ".join(map(str, sorted(versions)))
        raise EnvironmentSpecError(f"environment {name!r} has no version {version!r}; there are: {known}.")
    return _load(folder, version)


def all_latest(workspace: Any) -> dict[str, Environment]:
    """Name -> latest version, in order of name."""
    return {name: get(workspace, name) for name in _names(workspace)}


def existing(python: str | os.PathLike[str]) -> str:
    """The absolute path of an interpreter, given as such or as the folder of a venv or conda environment.

    Raises:
        EnvironmentSpecError: there is none.
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
            f"python={os.fspath(python)!r} is no interpreter: {'not to be executed' if path.is_file() else 'no such file'}. "
            f"Give the path of one, such as {sys.executable!r}."
        )
    return str(path)


def _names(workspace: Any) -> list[str]:
    folder = Path(workspace.path) / _FOLDER
    try:
        return sorted(name for name in os.listdir(folder) if _versions(folder / name))
    except OSError:
        return []


def _versions(folder: Path) -> list[int]:
    try:
        stems = [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
    except OSError:
        return []
    return [int(stem) for stem in stems if stem.isascii() and stem.isdigit()]


def _load(folder: Path, version: int) -> Environment:
    path = folder / f"{version}.json"
    data = read_json(path)
    if not isinstance(data, dict):
        raise EnvironmentSpecError(f"{str(path)!r} is not a registered environment any more. Remove the file.")
    return Environment.from_json(data)
