"""The environment that the package options of a command line describe (`paceline.cli.run_options.PACKAGES`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.cli.run_options import one_file
from paceline.environments.from_parameters import described
from paceline.estimator import interpreter
from paceline.job.environment import EnvironmentSpec


def environment_of(given: Mapping[str, Any], source_directory: Path) -> EnvironmentSpec:
    """The environment. given: the options' values; source_directory: where the files that they name are looked for first.

    Raises:
        JobError, EnvironmentSpecError: as `paceline.environments.from_parameters.described`.
    """
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
