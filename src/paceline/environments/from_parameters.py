"""Make environments from an estimator's parameters or from command line options."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.environments.environment import Environment
from paceline.errors import JobError
from paceline.job.environment import EnvironmentSpec


def described(
    *,
    definition: EnvironmentSpec | None,
    source_directory: str | os.PathLike[str],
    python: str | None,
    layered: bool,
    user_managed: bool,
    pip_packages: Sequence[str] | None,
    pip_requirements_file: str | None,
    conda_packages: Sequence[str] | None,
    conda_channels: Sequence[str] | None,
    conda_dependencies_file: str | None,
    docker_image: str | None,
    shm_size: str | None,
) -> EnvironmentSpec:
    """Return the environment that an estimator's parameters describe.

    Relative paths are looked up in source_directory, then in the working directory.

    Raises:
        JobError: Parameters contradict each other, or a file does not exist.
        EnvironmentSpecError: A file or package can't be read.
    """
    options = {
        "pip_packages": pip_packages,
        "pip_requirements_file": pip_requirements_file,
        "conda_packages": conda_packages,
        "conda_channels": conda_channels,
        "conda_dependencies_file": conda_dependencies_file,
        "python": python,
        "user_managed": user_managed,
        "custom_docker_image": docker_image,
        "shm_size": shm_size,
    }
    _check_types(options, layered)
    named = [name for name, value in options.items() if value]
    if definition is not None:
        if not isinstance(definition, EnvironmentSpec):
            raise JobError(
                f"environment_definition={definition!r} must be an Environment. Create one, or get a registered one."
            )
        if named:
            raise JobError(
                f"environment_definition together with {', '.join(named)}: the environment says it all. "
                f"Leave out {'it' if len(named) == 1 else 'them'}, or environment_definition."
            )
        return definition
    _check_sense(options)
    both = [
        name for name in named if name in ("conda_packages", "pip_packages", "pip_requirements_file", "conda_channels")
    ]
    if conda_dependencies_file is not None and both:
        raise JobError(
            f"conda_dependencies_file together with {' and '.join(both)}: the file says it all. "
            "Put the packages into the file, or leave the file out."
        )
    values: dict[str, Any] = {
        "python": python,
        "user_managed": user_managed,
        "docker_image": docker_image,
        "shm_size": shm_size,
    }
    packages, conda = _packages("pip_packages", pip_packages), _packages("conda_packages", conda_packages)
    if conda_dependencies_file is not None:
        path = _file("conda_dependencies_file", conda_dependencies_file, source_directory)
        return _checked(replace(Environment.from_conda_specification(None, path), **values))
    environment = Environment()
    if pip_requirements_file is not None:
        path = _file("pip_requirements_file", pip_requirements_file, source_directory)
        environment = Environment.from_pip_requirements(None, path)
    values |= {
        # With conda packages the environment may get a new interpreter, which has no packages to build upon.
        "layered": layered and not conda,
        "pip_packages": packages,
        "conda_packages": conda,
        "conda_channels": _packages("conda_channels", conda_channels),
    }
    return _checked(replace(environment, **values))


def _check_types(given: Mapping[str, object], layered: object) -> None:
    for name in ("pip_requirements_file", "conda_dependencies_file", "custom_docker_image", "shm_size"):
        if given[name] is not None and not isinstance(given[name], (str, os.PathLike)):
            raise JobError(f"{name}={given[name]!r} is not a string.")
    for name, value in (("user_managed", given["user_managed"]), ("layered", layered)):
        if not isinstance(value, bool):
            raise JobError(f"{name}={value!r} is not a bool. Write {name}=True or {name}=False.")


def _check_sense(given: Mapping[str, object]) -> None:
    """Raise JobError for options that have no effect together with the other options."""
    image, shm_size, channels = given["custom_docker_image"], given["shm_size"], given["conda_channels"]
    if shm_size is not None and image is None:
        raise JobError(
            f"shm_size={shm_size!r} without custom_docker_image: it is the size of a container's /dev/shm. Name an image, or "
            "leave it out."
        )
    if image is not None and given["user_managed"]:
        raise JobError("custom_docker_image with user_managed=True: an image never changes. Leave user_managed out.")
    if channels and not given["conda_packages"] and not given["conda_dependencies_file"]:
        raise JobError(
            f"conda_channels={channels!r} without conda_packages: nothing would come from there. Name packages."
        )


def _checked(environment: EnvironmentSpec) -> EnvironmentSpec:
    from paceline.environments import requirements

    if environment.needs_build:
        requirements.lines_of(environment)
        requirements.constraints_of(environment)
    return environment


def _packages(name: str, packages: object) -> tuple[str, ...]:
    if packages is None:
        return ()
    if isinstance(packages, str) or not isinstance(packages, Sequence):
        raise JobError(f"{name}={packages!r} is not a list of strings. Write it as [{packages!r}].")
    for package in packages:
        if not isinstance(package, str) or not package.strip():
            raise JobError(f"{name} has {package!r} in it, which is not the name of a package.")
    return tuple(packages)


def _file(name: str, path: str, source_directory: str | os.PathLike[str]) -> str:
    for candidate in (Path(source_directory) / path, Path(path)):
        if candidate.is_file():
            return str(candidate)
    raise JobError(f"{name}={path!r}: no such file, neither in the source directory nor in the working directory.")
