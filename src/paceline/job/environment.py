"""What a run's interpreter must have, as frozen data that goes to JSON and back. What builds it is beside this file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paceline.environments.check import check, normalise
from paceline.errors import EnvironmentSpecError


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment of a run's script.

    name, version: under which it is registered; None for one that is not.
    python: interpreter that it is made from, or, with nothing to install, the one that runs the script; an absolute
        path, or a name on the image's PATH with `docker_image`. None for the submitting interpreter.
    python_version: for conda, such as "3.11"; None lets the solver choose.
    layered: what the base interpreter has installed is there too, and only what it lacks is added. False: nothing but
        what is named here, with what that requires.
    user_managed: the interpreter is used as it is; nothing may be named for installation.
    pip_packages: requirements as pip takes them; local paths are made absolute. pip_requirements: the text of a
        requirements file, nothing included from others (see `from_pip_requirements`). pip_constraints: versions that hold
        if the package is needed at all, as `pip install -c` takes them.
    conda_packages: match specs. conda_channels: names or URLs, `file://` too; first has priority.
    environment_variables: for every worker; a job's own are laid over them.
    docker_image: the workers run in a container of this image. shm_size: of its /dev/shm, such as "2g".
    locked_pip: exact versions ("einops==0.8.1") that are installed in place of what pip would choose.
    locked_conda: exact packages (URLs with `#sha256`) that are installed in place of what the solver would choose.

    Raises:
        EnvironmentSpecError: values that contradict each other, or a password in a URL.
    """

    name: str | None = None
    version: int | None = None
    python: str | None = None
    python_version: str | None = None
    layered: bool = False
    user_managed: bool = False
    pip_packages: tuple[str, ...] = ()
    pip_requirements: str | None = None
    pip_constraints: tuple[str, ...] = ()
    conda_packages: tuple[str, ...] = ()
    conda_channels: tuple[str, ...] = ()
    environment_variables: Mapping[str, str] = field(default_factory=dict)
    docker_image: str | None = None
    shm_size: str | None = None
    locked_pip: tuple[str, ...] = ()
    locked_conda: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        normalise(self)
        check(self)

    @property
    def uses_conda(self) -> bool:
        """Whether conda packages make the interpreter."""
        return bool(self.conda_packages or self.locked_conda)

    @property
    def needs_build(self) -> bool:
        """Whether there is something to install; else the interpreter is used as it is."""
        return self.uses_conda or bool(self.pip_packages or (self.pip_requirements or "").strip() or self.locked_pip)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, defaults left out."""
        values = asdict(self) | {"environment_variables": dict(self.environment_variables)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] not in (None, (), {}, False)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Environment:
        """The environment that `to_json` wrote.

        Raises:
            EnvironmentSpecError: a field that this version does not know, or a wrong value.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise EnvironmentSpecError(f"unknown fields of an environment {unknown}; known are {sorted(known)}.")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return cls(**values)

    @classmethod
    def from_pip_requirements(
        cls, name: str | None, file_path: str | os.PathLike[str], *, python: str | None = None, layered: bool = False
    ) -> Environment:
        """What a requirements file names; files that it includes (`-r`, `-c`) are read too, relative to it.

        Raises:
            EnvironmentSpecError: a file is missing or not UTF-8, or a line is one that pip could not parse.
        """
        from paceline.environments import requirements

        text, constraints = requirements.read(file_path)
        return cls(name=name, python=python, layered=layered, pip_requirements=text, pip_constraints=constraints)

    @classmethod
    def from_conda_specification(cls, name: str | None, file_path: str | os.PathLike[str]) -> Environment:
        """What a conda environment file (environment.yml) names: channels, dependencies and those under `pip:`.

        Raises:
            EnvironmentSpecError: the file is missing or not YAML, or has something else in it.
        """
        from paceline.environments import conda_file

        return cls(name=name, **conda_file.read(file_path))

    @classmethod
    def from_existing(cls, name: str | None, python: str | os.PathLike[str]) -> Environment:
        """An interpreter that is there, used as it is. python: its path, or that of a venv or conda environment.

        Raises:
            EnvironmentSpecError: there is no such interpreter.
        """
        from paceline.environments import registry

        return cls(name=name, python=registry.existing(python), user_managed=True)

    def register(self, workspace: Any) -> Environment:
        """This environment under its name in the workspace, with its version there.

        The latest version comes back if it is the same; else the next is made.

        Raises:
            EnvironmentSpecError: it has no name.
        """
        from paceline.environments import registry

        return registry.register(self, workspace)

    @classmethod
    def get(cls, workspace: Any, name: str, version: int | None = None) -> Environment:
        """The environment registered under this name; version None for the latest.

        Raises:
            EnvironmentSpecError: there is none.
        """
        from paceline.environments import registry

        return registry.get(workspace, name, version)

    @classmethod
    def list(cls, workspace: Any) -> dict[str, Environment]:
        """Name -> latest version, for all that are registered in the workspace."""
        from paceline.environments import registry

        return registry.all_latest(workspace)
