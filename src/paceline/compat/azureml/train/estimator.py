"""Estimators (`azureml.train.estimator`, `.dnn`, `.sklearn`).

A submission converts them into ScriptRunConfigs.
https://learn.microsoft.com/python/api/azureml-train-core/azureml.train.estimator.estimator
"""

from __future__ import annotations

import copy
import logging
import os
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.compat.azureml.core.conda_dependencies import CondaDependencies
from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.core.runconfig import MpiConfiguration, TensorflowConfiguration
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.exceptions import TrainingException, UserErrorException
from paceline.compat.azureml.submission import reference_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline import Workspace
    from paceline.compat.azureml.core.experiment import Experiment
    from paceline.compat.azureml.core.run import ScriptRun

__all__ = [
    "Chainer",
    "Estimator",
    "Gloo",
    "MMLBaseEstimator",
    "Mpi",
    "Nccl",
    "ParameterServer",
    "PyTorch",
    "SKLearn",
    "TensorFlow",
]

_log = logging.getLogger("paceline.azureml")


class Mpi(MpiConfiguration):
    """Settings for Open MPI workers."""

    def __init__(self, process_count_per_node: int = 1) -> None:
        super().__init__(process_count_per_node)

    def __str__(self) -> str:
        return "mpi"


class ParameterServer(TensorflowConfiguration):
    """Settings for workers and parameter servers of TensorFlow."""

    def __init__(self, worker_count: int = 1, parameter_server_count: int = 1) -> None:
        super().__init__(worker_count, parameter_server_count)

    def __str__(self) -> str:
        return "ps"


class Gloo:
    """Settings for workers with torch's gloo backend."""

    def __str__(self) -> str:
        return "gloo"


class Nccl:
    """Settings for workers with torch's nccl backend."""

    def __str__(self) -> str:
        return "nccl"


class MMLBaseEstimator(ScriptRunConfig):
    """The common base of the estimators.

    Parameters after source_directory are keyword-only. A run may ignore vm_size, vm_priority, image_registry_details,
    source_directory_data_store and use_docker. `script_params` maps options to values, "" for a flag.

    Raises:
        TrainingException: compute_target and vm_size are both missing, a count is below 1, or parameters are unknown or
            contradict each other.
    """

    _framework: ClassVar[str | None] = None
    #: Python module of the framework, such as torch. The estimator's environment includes the module's package.
    _module: ClassVar[str] = ""
    _backends: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "nccl", "ps")
    _default_version: ClassVar[str | None] = None
    _versions: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        source_directory: str,
        *,
        compute_target: object = None,
        vm_size: str | None = None,
        vm_priority: str | None = None,
        entry_script: str | None = None,
        script_params: Mapping[str, object] | None = None,
        node_count: int = 1,
        process_count_per_node: int = 1,
        worker_count: int = 1,
        parameter_server_count: int = 1,
        distributed_backend: str | None = None,
        distributed_training: object = None,
        use_gpu: bool = False,
        use_docker: bool = True,
        custom_docker_base_image: str | None = None,
        custom_docker_image: str | None = None,
        image_registry_details: object = None,
        user_managed: bool = False,
        conda_packages: list[str] | None = None,
        pip_packages: list[str] | None = None,
        conda_dependencies_file_path: str | None = None,
        pip_requirements_file_path: str | None = None,
        conda_dependencies_file: str | None = None,
        pip_requirements_file: str | None = None,
        environment_variables: dict[str, str] | None = None,
        environment_definition: Environment | None = None,
        inputs: Sequence[object] | None = None,
        source_directory_data_store: object = None,
        shm_size: str | None = None,
        resume_from: object = None,
        max_run_duration_seconds: int | None = None,
        framework_version: str | None = None,
        **others: object,
    ) -> None:
        if unknown := [name for name in others if not name.startswith("_") and name != "base_image"]:
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {unknown[0]!r}")
        if compute_target is None and vm_size is None:
            raise TrainingException("Either compute target or vm size should be specified.")
        if script_params is not None and not isinstance(script_params, dict):
            raise TrainingException(f"script_params={script_params!r} is not a dict.")
        image = custom_docker_image or custom_docker_base_image
        packages = [conda_packages, pip_packages, conda_dependencies_file, conda_dependencies_file_path]
        packages += [pip_requirements_file, pip_requirements_file_path]
        others_said = [image, user_managed, environment_variables, use_gpu, shm_size]
        if environment_definition is not None and (any(packages) or any(others_said)):
            raise TrainingException(
                "environment_definition together with packages, an image, use_gpu, shm_size or variables: the environment says "
                "it all."
            )
        if image is not None and not use_docker:
            raise TrainingException(f"use_docker=False together with the image {image!r}; use only one.")
        if (conda_dependencies_file or conda_dependencies_file_path) and (conda_packages or pip_packages):
            raise TrainingException("a conda file excludes conda_packages and pip_packages. Put them into the file.")
        if user_managed and any(packages):
            raise TrainingException("user_managed=True excludes packages: it installs nothing.")
        super().__init__(source_directory=source_directory or ".", script=entry_script, resume_from=resume_from)
        self.script_params = dict(script_params or {})
        self.inputs = list(inputs or ())
        self.use_gpu = bool(use_gpu)
        self.framework_version = framework_version or self._default_version
        run = self.run_config
        run.target = compute_target if compute_target is not None else "local"
        run.framework = self._framework or "Python"
        run.max_run_duration_seconds = max_run_duration_seconds
        run.amlcompute.vm_size, run.amlcompute.vm_priority = vm_size, vm_priority
        run.environment = environment_definition or _environment(
            user_managed=user_managed,
            image=image if use_docker else None,
            conda_packages=conda_packages,
            pip_packages=pip_packages,
            conda_file=_one("conda_dependencies_file", conda_dependencies_file, conda_dependencies_file_path),
            pip_file=_one("pip_requirements_file", pip_requirements_file, pip_requirements_file_path),
            source_directory=self.source_directory,
            variables=environment_variables,
            shm_size=shm_size,
        )
        if environment_definition is None:
            run.environment._made_for = (self._module, f"the estimator {type(self).__name__}")
        self._distribute(
            node_count,
            process_count_per_node,
            worker_count,
            parameter_server_count,
            distributed_backend,
            distributed_training,
        )

    @property
    def conda_dependencies(self) -> CondaDependencies | None:
        """The environment's packages, which the program may change."""
        return self.run_config.environment.python.conda_dependencies

    @classmethod
    def get_supported_versions(cls) -> list[str]:
        """Return the SDK's framework versions, although runs use the installed version."""
        return list(cls._versions)

    def _distribute(
        self, nodes: int, per_node: int, workers: int, servers: int, backend: object, training: object
    ) -> None:
        for name, value in (("node_count", nodes), ("process_count_per_node", per_node)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TrainingException(f"{name}={value!r} must be a number of 1 or more.")
        if training is not None and backend is not None:
            raise TrainingException("distributed_training and distributed_backend exclude each other; use only one.")
        if isinstance(training, MpiConfiguration):
            backend, per_node = "mpi", max(per_node, training.process_count_per_node)
        elif isinstance(training, TensorflowConfiguration):
            backend, workers, servers = "ps", training.worker_count, training.parameter_server_count
        elif training is not None:
            backend = str(training)
        if backend is not None and str(backend).lower() not in self._backends:
            known = ", ".join(self._backends) or "none"
            raise TrainingException(
                f"Unsupported distributed backend value: {backend}. {type(self).__name__} has {known}."
            )
        run = self.run_config
        run.node_count = nodes
        if backend is None:
            if nodes > 1 or per_node > 1:
                raise TrainingException(
                    f"node_count={nodes}, process_count_per_node={per_node} need distributed_backend: "
                    f"{', '.join(self._backends)}."
                )
            return
        backend = str(backend).lower()
        run.mpi.process_count_per_node = per_node
        run.tensorflow.worker_count, run.tensorflow.parameter_server_count = workers, servers
        run.pytorch.process_count = nodes * per_node
        run.communicator = {"mpi": "IntelMpi", "ps": "ParameterServer", "gloo": "Gloo", "nccl": "Nccl"}[backend]

    def with_overrides(
        self,
        script_params: Mapping[str, object] | None = None,
        inputs: Sequence[object] | None = None,
        **overrides: object,
    ) -> MMLBaseEstimator:
        """Return a copy with overrides from `Experiment.submit`.

        `script_params` extend the estimator's, `inputs` replace its list. source_directory_data_store has no effect.

        Raises:
            UserErrorException: `overrides` has a parameter other than source_directory_data_store.
        """
        made = copy.copy(self)
        made.script_params = {**self.script_params, **(script_params or {})}
        made.inputs = list(inputs or self.inputs)
        overrides.pop("source_directory_data_store", None)
        if overrides:
            raise UserErrorException(f"submit can't override {', '.join(sorted(overrides))} of an estimator.")
        return made

    def script_run_config(self, workspace: Workspace) -> ScriptRunConfig:
        """Return the estimator as a ScriptRunConfig, with script_params as arguments."""
        made = copy.copy(self)
        made.run_config = copy.copy(self.run_config)
        words: list[object] = []
        for name, value in self.script_params.items():
            words += [word for word in (name, value) if not (isinstance(word, str) and word == "")]
        made.run_config.arguments = words
        data = dict(self.run_config.data_references)
        for value in self.inputs:
            reference = reference_of(value, workspace)
            if reference is None:
                raise TrainingException(f"inputs has {value!r}, which is not data.")
            data[reference.name] = reference
        made.run_config.data_references = data
        return made

    def _submit_to(
        self,
        experiment: Experiment,
        tags: Mapping[str, object] | None,
        *,
        run_id: str | None = None,
        parent_run_id: str | None = None,
        display_name: str | None = None,
        **overrides: Any,
    ) -> ScriptRun:
        config = self.with_overrides(**overrides)
        return experiment._submit_script(
            config.script_run_config(experiment.workspace),
            tags,
            run_id=run_id,
            parent_run_id=parent_run_id,
            display_name=display_name,
        )


class Estimator(MMLBaseEstimator):
    """An estimator for any script, with any distributed backend."""


class PyTorch(MMLBaseEstimator):
    """An estimator for a PyTorch script."""

    _framework = "PyTorch"
    _module = "torch"
    _backends = ("mpi", "gloo", "nccl")
    _default_version = "1.4"
    _versions = ("1.0", "1.1", "1.2", "1.3", "1.4", "1.5", "1.6")


class TensorFlow(MMLBaseEstimator):
    """An estimator for a TensorFlow script."""

    _framework = "TensorFlow"
    _module = "tensorflow"
    _backends = ("mpi", "ps")
    _default_version = "1.13"
    _versions = ("1.10", "1.12", "1.13", "2.0", "2.1", "2.2", "2.3")


class Chainer(MMLBaseEstimator):
    """An estimator for a Chainer script."""

    _backends = ("mpi",)
    _default_version = "5.1.0"
    _versions = ("5.1.0", "7.0.0")


class SKLearn(MMLBaseEstimator):
    """An estimator for a scikit-learn script, with a single process."""

    _module = "sklearn"
    _backends = ()
    _default_version = "0.20.3"
    _versions = ("0.20.3",)


def _one(name: str, new: str | None, old: str | None) -> str | None:
    if new is not None and old is not None:
        _log.warning("%s and %s_path are both given: %s is used.", name, name, name)
    return new if new is not None else old


def _environment(
    *,
    user_managed: bool,
    image: str | None,
    conda_packages: list[str] | None,
    pip_packages: list[str] | None,
    conda_file: str | None,
    pip_file: str | None,
    source_directory: str,
    variables: dict[str, str] | None,
    shm_size: str | None,
) -> Environment:
    def found(path: str) -> str:
        below = os.path.join(source_directory, path)
        return below if os.path.exists(below) else path

    if conda_file is not None:
        made = Environment.from_conda_specification("estimator", found(conda_file))
    elif pip_file is not None:
        made = Environment.from_pip_requirements("estimator", found(pip_file))
    else:
        made = Environment("estimator")
    made.environment_variables = dict(variables or {})
    made.python.user_managed_dependencies = user_managed
    made.docker.shm_size = shm_size
    if image is not None:
        made.docker.enabled, made.docker.base_image = True, image
        # Use the packages of the image, unless the program lists packages as well.
        made.python.user_managed_dependencies = not (conda_packages or pip_packages or conda_file or pip_file)
    dependencies = made.python.conda_dependencies
    assert dependencies is not None
    for package in conda_packages or ():
        dependencies.add_conda_package(package)
    for package in pip_packages or ():
        dependencies.add_pip_package(package)
    return made
