"""A script with its run configuration (`azureml.core.script_run_config`).

https://learn.microsoft.com/python/api/azureml-core/azureml.core.scriptrunconfig
"""

from __future__ import annotations

import copy
import logging
import os
import shlex
from typing import TYPE_CHECKING

from paceline.compat.azureml.core.runconfig import DockerConfiguration, RunConfiguration, set_distribution
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.records import late

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.compat.azureml.core.environment import Environment

__all__ = ["ScriptRunConfig"]

_log = logging.getLogger("paceline.azureml")


class ScriptRunConfig:
    """A script or command for `Experiment.submit`.

    The attribute `run_config` is never None. Its settings may change until the submission.

    Args:
        source_directory: Folder that is copied; the script runs in the copy.
        script, arguments: The script and its arguments. Give either these or `command`, which a shell runs.
        run_config: A RunConfiguration. If given, compute_target, environment and similar arguments are ignored.
        compute_target: A target or its name.
        max_run_duration_seconds: Time limit of the run in seconds; default: 30 days.

    Raises:
        UserErrorException: Both a script and a command are present, or a value has the wrong type.
    """

    MAX_DURATION_SECONDS_DEFAULT = 30 * 24 * 60 * 60

    def __init__(
        self,
        source_directory: str | None = None,
        script: str | None = None,
        arguments: Sequence[object] | str | None = None,
        run_config: RunConfiguration | None = None,
        _telemetry_values: object = None,
        compute_target: object = None,
        environment: Environment | None = None,
        distributed_job_config: object = None,
        resume_from: object = None,
        max_run_duration_seconds: int | None = 2592000,
        command: Sequence[object] | str | None = None,
        docker_runtime_config: DockerConfiguration | None = None,
    ) -> None:
        if command is not None and (script is not None or arguments is not None):
            raise UserErrorException("command excludes script and arguments.")
        self.source_directory = os.fspath(source_directory) if source_directory else "."
        self.script = script
        self.arguments = arguments
        self.command = command
        self.resume_from = resume_from
        if run_config is not None and not isinstance(run_config, RunConfiguration):
            raise UserErrorException(f"run_config={run_config!r} must be a RunConfiguration.")
        self.run_config = run_config if run_config is not None else RunConfiguration()
        given = {
            "compute_target": compute_target,
            "environment": environment,
            "distributed_job_config": distributed_job_config,
            "docker_runtime_config": docker_runtime_config,
        }
        if run_config is not None:
            if ignored := [name for name, value in given.items() if value is not None]:
                _log.warning(
                    "If run_config is given, %s %s ignored.", ", ".join(ignored), "is" if len(ignored) == 1 else "are"
                )
        else:
            self.run_config.target = compute_target
            if environment is not None:
                self.run_config.environment = environment
            set_distribution(self.run_config, distributed_job_config)
            if docker_runtime_config is not None:
                self.run_config.docker = docker_runtime_config
            self.run_config.max_run_duration_seconds = max_run_duration_seconds

    def settled(self) -> ScriptRunConfig:
        """Return a copy with a separate run_config that holds all settings.

        A copy is needed because several ScriptRunConfigs, each with its own script, may share a run_config.
        """
        made = copy.copy(self)
        made.run_config = run = copy.copy(self.run_config)
        if self.script is not None:
            run.script, run.command = self.script, None
        if self.command is not None:
            run.command = self.command
        if self.arguments is not None:
            run.arguments = self.arguments
        made.script = made.arguments = made.command = None
        return made

    def __repr__(self) -> str:
        script = self.script or self.run_config.script
        return f"ScriptRunConfig(source_directory={self.source_directory!r}, script={script!r})"


def argument_list(arguments: object) -> list[object]:
    """Return arguments as a list. Split a string as a shell does.

    Raises:
        UserErrorException: The value must be a list or a string.
    """
    if arguments is None:
        return []
    if isinstance(arguments, str):
        return list(shlex.split(arguments))
    if isinstance(arguments, (list, tuple)):
        return list(arguments)
    raise UserErrorException(f"arguments={arguments!r} must be a list or a string.")


def __getattr__(name: str) -> object:
    if name == "ScriptRun":
        return late("core.run", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
