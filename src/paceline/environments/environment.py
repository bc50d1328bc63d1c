"""`paceline.Environment`: an `EnvironmentSpec` with methods to read and register it."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING

from paceline.environments import registry, requirements
from paceline.job.environment import EnvironmentSpec

if TYPE_CHECKING:
    from paceline.workspace import Workspace


class Environment(EnvironmentSpec):
    __doc__ = f"""{inspect.cleandoc(EnvironmentSpec.__doc__ or "")}

Examples:
    >>> environment = pl.Environment(name="vision", pip_packages=("einops==0.8.1",))
    >>> environment.register(pl.Workspace("my_runs")).version
    1
"""

    @classmethod
    def from_pip_requirements(
        cls, name: str | None, file_path: str | os.PathLike[str], *, python: str | None = None, layered: bool = False
    ) -> Environment:
        """Create an environment from a requirements file.

        Args:
            name: Name of the environment.
            file_path: The requirements file.
            python: Base interpreter; default: the interpreter of this process.
            layered: Whether the environment also sees the packages of the base interpreter.

        Raises:
            EnvironmentSpecError: A file is missing or not UTF-8, or pip can't parse a line.
        """
        text, constraints = requirements.read(file_path)
        return cls(name=name, python=python, layered=layered, pip_requirements=text, pip_constraints=constraints)

    @classmethod
    def from_conda_specification(cls, name: str | None, file_path: str | os.PathLike[str]) -> Environment:
        """Create an environment from a conda environment file (environment.yml).

        Args:
            name: Name of the environment.
            file_path: The environment file.

        Raises:
            EnvironmentSpecError: The file is missing, not YAML, or has an unknown entry.
        """
        return cls(name=name, **requirements.read_conda_file(file_path))

    @classmethod
    def from_existing(cls, name: str | None, python: str | os.PathLike[str]) -> Environment:
        """Create an environment from an existing interpreter, without installing packages.

        Args:
            name: Name of the environment.
            python: Path of the interpreter, or of a venv or conda environment.

        Raises:
            EnvironmentSpecError: The interpreter does not exist.
        """
        return cls(name=name, python=registry.existing(python), user_managed=True)

    def register(self, workspace: Workspace) -> Environment:
        """Register this environment in the workspace. Return it with its version.

        If the latest version is equal to this environment, no new version is made.

        Raises:
            EnvironmentSpecError: The environment has no name.
        """
        return registry.register(self, workspace.path)

    @classmethod
    def get(cls, workspace: Workspace, name: str, version: int | None = None) -> Environment:
        """Return a registered environment.

        Args:
            workspace: Workspace in which the environment is registered.
            name: Name of the environment.
            version: Version number; default: the latest.

        Raises:
            EnvironmentSpecError: The workspace has no such environment or version.
        """
        return registry.get(cls, workspace.path, name, version)

    @classmethod
    def list(cls, workspace: Workspace) -> dict[str, Environment]:
        """Return the latest version of every environment in the workspace, by name."""
        return registry.all_latest(cls, workspace.path)
