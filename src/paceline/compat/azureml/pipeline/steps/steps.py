"""Script, command, estimator and MPI steps (`azureml.pipeline.steps`).

https://learn.microsoft.com/python/api/azureml-pipeline-steps/azureml.pipeline.steps
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.compat.azureml.core.runconfig import MpiConfiguration, RunConfiguration
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.pipeline.core.builder import PipelineStep
from paceline.compat.azureml.pipeline.filling import Filling
from paceline.compat.azureml.train.estimator import Estimator, MMLBaseEstimator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["CommandStep", "EstimatorStep", "MpiStep", "PythonScriptStep"]


#: Parameter of a run configuration -> (section, attribute) that the parameter sets. The section "" is the top level.
_RUN_PARAMS = {
    "NodeCount": ("", "node_count"),
    "MpiProcessCountPerNode": ("mpi", "process_count_per_node"),
    "TensorflowWorkerCount": ("tensorflow", "worker_count"),
    "TensorflowParameterServerCount": ("tensorflow", "parameter_server_count"),
}


class _ConfiguredStep(PipelineStep):
    """A step with a run configuration.

    `run_params` change the configuration. `params` become the script's environment variables.
    """

    def __init__(
        self,
        name: str,
        inputs: Iterable[object] | None,
        outputs: Iterable[object] | None,
        arguments: object,
        run_params: Mapping[str, object] | None,
        params: Mapping[str, object] | None = None,
    ) -> None:
        if unknown := sorted(set(run_params or {}) - set(_RUN_PARAMS)):
            raise UserErrorException(
                f"runconfig_pipeline_params has {unknown[0]!r}; it must be one of {', '.join(_RUN_PARAMS)}."
            )
        self._run_params, self._params = dict(run_params or {}), dict(params or {})
        super().__init__(name, inputs, outputs, arguments)
        self.compute_target: object = None

    def _values(self) -> list[object]:
        return [*super()._values(), self._params, self._run_params]

    def _run_config(self, filling: Filling, given: RunConfiguration | None) -> RunConfiguration:
        run = RunConfiguration() if given is None else copy.copy(given)
        run.mpi, run.tensorflow = copy.copy(run.mpi), copy.copy(run.tensorflow)
        if self.compute_target is not None:
            run.target = self.compute_target
        for name, value in self._run_params.items():
            part, attribute = _RUN_PARAMS[name]
            setattr(getattr(run, part) if part else run, attribute, int(filling.value(value)))
        variables = {f"AML_PARAMETER_{name}": str(filling.value(value)) for name, value in self._params.items()}
        run.environment_variables = {**(run.environment_variables or {}), **variables}
        return run


@sdk_class
class PythonScriptStep(_ConfiguredStep):
    """A step that runs a script.

    Args:
        runconfig: Environment, communicator and other settings.
        compute_target: A target or its name; default: the target in the runconfig, otherwise this machine.
        params: Maps names to values. The script gets each value as the environment variable AML_PARAMETER_<name>.
        runconfig_pipeline_params: Maps NodeCount, MpiProcessCountPerNode, TensorflowWorkerCount or
            TensorflowParameterServerCount to a PipelineParameter.
        allow_reuse: Reuse the outputs of an earlier step with the same script, arguments, inputs and environment.
        version, hash_paths: Accepted without effect.

    Raises:
        UserErrorException: The script does not exist, or a value is wrong.
    """

    def __init__(
        self,
        script_name: str,
        name: str | None = None,
        arguments: object = None,
        compute_target: object = None,
        runconfig: RunConfiguration | None = None,
        runconfig_pipeline_params: Mapping[str, object] | None = None,
        inputs: Iterable[object] | None = None,
        outputs: Iterable[object] | None = None,
        params: Mapping[str, object] | None = None,
        source_directory: str | None = None,
        allow_reuse: bool = True,
        version: str | None = None,
        hash_paths: object = None,
    ) -> None:
        if not script_name:
            raise UserErrorException("script_name is required with PythonScriptStep.")
        super().__init__(name or script_name, inputs, outputs, arguments, runconfig_pipeline_params, params)
        self.script_name, self.compute_target, self.runconfig = script_name, compute_target, runconfig
        self.source_directory, self.allow_reuse = source_directory, bool(allow_reuse)

    def _configuration(self, filling: Filling, source_directory: str | None) -> ScriptRunConfig:
        run = self._run_config(filling, self.runconfig)
        return ScriptRunConfig(
            self.source_directory or source_directory or ".", self.script_name, list(self.arguments), run
        )


@sdk_class
class CommandStep(_ConfiguredStep):
    """A step that runs a shell command.

    The command is a string, or a list of words and data. `runconfig` is a RunConfiguration or a ScriptRunConfig.

    Raises:
        UserErrorException: The command is missing.
    """

    def __init__(
        self,
        command: str | Sequence[object] | None = None,
        name: str | None = None,
        compute_target: object = None,
        runconfig: ScriptRunConfig | RunConfiguration | None = None,
        runconfig_pipeline_params: Mapping[str, object] | None = None,
        inputs: Iterable[object] | None = None,
        outputs: Iterable[object] | None = None,
        params: Mapping[str, object] | None = None,
        source_directory: str | None = None,
        allow_reuse: bool = True,
        version: str | None = None,
    ) -> None:
        config = runconfig.run_config if isinstance(runconfig, ScriptRunConfig) else runconfig
        command = command or (config.command if config is not None else None)
        if not command:
            raise UserErrorException("command is required with CommandStep.")
        self.command = list(command) if isinstance(command, (list, tuple)) else command
        super().__init__(name or "command", inputs, outputs, None, runconfig_pipeline_params, params)
        self.compute_target, self.runconfig, self.allow_reuse = compute_target, config, bool(allow_reuse)
        given = runconfig.source_directory if isinstance(runconfig, ScriptRunConfig) else None
        self.source_directory = source_directory or given

    def _values(self) -> list[object]:
        return [*super()._values(), self.command]

    def _configuration(self, filling: Filling, source_directory: str | None) -> ScriptRunConfig:
        run = self._run_config(filling, self.runconfig)
        run.script, run.arguments = None, []
        return ScriptRunConfig(self.source_directory or source_directory or ".", run_config=run, command=self.command)


@sdk_class
class EstimatorStep(_ConfiguredStep):
    """A step that runs an estimator.

    `estimator_entry_script_arguments` has the script's arguments. The estimator's script_params must be empty.

    Raises:
        UserErrorException: The estimator is missing, or has script_params.
    """

    def __init__(
        self,
        name: str | None = None,
        estimator: MMLBaseEstimator | None = None,
        estimator_entry_script_arguments: object = None,
        runconfig_pipeline_params: Mapping[str, object] | None = None,
        inputs: Iterable[object] | None = None,
        outputs: Iterable[object] | None = None,
        compute_target: object = None,
        allow_reuse: bool = True,
        version: str | None = None,
    ) -> None:
        if not isinstance(estimator, MMLBaseEstimator):
            raise UserErrorException(f"estimator={estimator!r} must be an estimator.")
        if estimator.script_params:
            raise UserErrorException(
                "script_params of a step's estimator must be empty: use estimator_entry_script_arguments."
            )
        words = estimator_entry_script_arguments
        super().__init__(name or str(estimator.script), inputs, outputs, words, runconfig_pipeline_params)
        self.estimator, self.compute_target, self.allow_reuse = estimator, compute_target, bool(allow_reuse)

    def _configuration(self, filling: Filling, source_directory: str | None) -> ScriptRunConfig:
        config = self.estimator.script_run_config(filling.workspace)
        config.run_config = self._run_config(filling, config.run_config)
        config.run_config.arguments = list(self.arguments)
        return config


class MpiStep(EstimatorStep):
    """A step that runs a script on several nodes over MPI.

    An estimator's keywords (use_gpu, pip_packages, ...) are accepted too.
    """

    def __init__(
        self,
        name: str | None = None,
        source_directory: str | None = None,
        script_name: str | None = None,
        arguments: object = None,
        compute_target: object = None,
        node_count: int | None = None,
        process_count_per_node: int | None = None,
        inputs: Iterable[object] | None = None,
        outputs: Iterable[object] | None = None,
        allow_reuse: bool = True,
        version: str | None = None,
        hash_paths: object = None,
        **kwargs: Any,
    ) -> None:
        if not script_name or compute_target is None:
            raise UserErrorException("script_name and compute_target are required with MpiStep.")
        kwargs.pop("environment_variables_params", None)
        estimator = Estimator(
            source_directory=source_directory or ".",
            entry_script=script_name,
            compute_target=compute_target,
            node_count=node_count or 1,
            process_count_per_node=process_count_per_node or 1,
            distributed_training=MpiConfiguration(),
            **kwargs,
        )
        super().__init__(name or script_name, estimator, arguments, None, inputs, outputs, None, allow_reuse, version)
