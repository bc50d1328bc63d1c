"""`paceline.Environment`: the data of `EnvironmentSpec` with the verbs that read it from files and register it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.environments import conda_file, registry, requirements
from paceline.job.environment import EnvironmentSpec

if TYPE_CHECKING:
    from paceline.workspace import Workspace


class Environment(EnvironmentSpec):
    __doc__ = EnvironmentSpec.__doc__

    @classmethod
    def from_pip_requirements(
        cls, name: str | None, file_path: str | os.PathLike[str], *, python: str | None = None, layered: bool = False
    ) -> Environment:
        """Make one of a requirements file; files that it includes (`-r`, `-c`) are read too, relative to it.

        Args:
            name: Name of the environment.
            file_path: pip's file of requirements.
            python: Interpreter that it is made from; None: this one.
            layered: Add the packages to those of the interpreter.

        Raises:
            EnvironmentSpecError: a file is missing or not UTF-8, or a line is one that pip could not parse.
        """
        text, constraints = requirements.read(file_path)
        return cls(name=name, python=python, layered=layered, pip_requirements=text, pip_constraints=constraints)

    @classmethod
    def from_conda_specification(cls, name: str | None, file_path: str | os.PathLike[str]) -> Environment:
        """Make one of a conda environment file (environment.yml): channels, dependencies and those under `pip:`.

        Args:
            name: Name of the environment.
            file_path: Conda's environment.yml.

        Raises:
            EnvironmentSpecError: the file is missing or not YAML, or has something else in it.
        """
        return cls(name=name, **conda_file.read(file_path))

    @classmethod
    def from_existing(cls, name: str | None, python: str | os.PathLike[str]) -> Environment:
        """An interpreter that is there, used as it is. python: its path, or that of a venv or conda environment.

        Args:
            name: Name of the environment.

        Raises:
            EnvironmentSpecError: there is no such interpreter.
        """
        return cls(name=name, python=registry.existing(python), user_managed=True)

    def register(self, workspace: Workspace) -> Environment:
        """This environment under its name in the workspace, with its version there.

        The latest version comes back if it is the same; else the next is made.

        Raises:
            EnvironmentSpecError: it has no name.
        """
        return registry.register(self, workspace)

    @classmethod
    def get(cls, workspace: Workspace, name: str, version: int | None = None) -> Environment:
        """The environment registered under this name; version None for the latest.

        Args:
            workspace: Workspace that it is registered in.

        Raises:
            EnvironmentSpecError: there is none.
        """
        return registry.get(cls, workspace, name, version)

    @classmethod
    def list(cls, workspace: Workspace) -> dict[str, Environment]:
        """Name -> latest version, for all that are registered in the workspace."""
        return registry.all_latest(cls, workspace)
