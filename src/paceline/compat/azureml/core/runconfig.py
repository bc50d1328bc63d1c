"""Run configurations (`azureml.core.runconfig`), mutable until they are submitted.

https://learn.microsoft.com/python/api/azureml-core/azureml.core.runconfig.runconfiguration
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.compat.azureml.core.conda_dependencies import CondaDependencies
from paceline.compat.azureml.core.environment import (
    DEFAULT_CPU_IMAGE,
    DEFAULT_GPU_IMAGE,
    ContainerRegistry,
    Environment,
)
from paceline.compat.azureml.exceptions import RunConfigurationException, UserErrorException
from paceline.compat.azureml.refused import EggLibrary, JarLibrary, MavenLibrary, PyPiLibrary, RCranLibrary
from paceline.compat.azureml.strict import Strict, camel_case

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DEFAULT_CPU_IMAGE", "DEFAULT_GPU_IMAGE", "CondaDependencies", "ContainerRegistry", "DataReferenceConfiguration",
    "DockerConfiguration", "EggLibrary", "Environment", "EnvironmentDefinition", "JarLibrary", "MavenLibrary",
    "MpiConfiguration", "ParallelTaskConfiguration", "PyPiLibrary", "PyTorchConfiguration", "RCranLibrary",
    "RunConfiguration", "TensorflowConfiguration",
]  # fmt: skip

#: In 2018, the SDK used this name for an environment.
EnvironmentDefinition = Environment


class MpiConfiguration(Strict):
    """Settings for Open MPI workers: `process_count_per_node` on each of `node_count` nodes."""

    def __init__(self, process_count_per_node: int = 1, node_count: int = 1) -> None:
        self.process_count_per_node = process_count_per_node
        self.node_count = node_count


class PyTorchConfiguration(Strict):
    """Settings for workers with torch's environment variables.

    Args:
        process_count: Total number of processes; None starts one on each node.
        communication_backend: Only a hint: the script's own call of `init_process_group` selects the backend.
    """

    def __init__(
        self, communication_backend: str = "Nccl", process_count: int | None = None, node_count: int = 1
    ) -> None:
        self.communication_backend = communication_backend
        self.process_count = process_count
        self.node_count = node_count


class TensorflowConfiguration(Strict):
    """Settings for workers with `TF_CONFIG`: for parameter servers, or for MultiWorkerMirroredStrategy."""

    def __init__(self, worker_count: int = 1, parameter_server_count: int = 1) -> None:
        self.worker_count = worker_count
        self.parameter_server_count = parameter_server_count


class ParallelTaskConfiguration(Strict):
    """Settings for parallel tasks, accepted without effect."""

    def __init__(self) -> None:
        self.max_retries_per_worker = 0
        self.worker_count_per_node = 1
        self.terminal_exit_codes: list[int] | None = None


class DockerConfiguration(Strict):
    """Container settings of a run.

    `use_docker` is a preference, as in `DockerSection`. `arguments` and `shared_volumes` have no effect.
    """

    def __init__(
        self,
        use_docker: bool = False,
        shared_volumes: bool = True,
        arguments: list[str] | None = None,
        shm_size: str | None = "2g",
    ) -> None:
        self.use_docker = use_docker
        self.shared_volumes = shared_volumes
        self.arguments = list(arguments or ())
        self.shm_size = shm_size


class DataReferenceConfiguration(Strict):
    """A path in a datastore, identified by the store's name."""

    def __init__(
        self,
        datastore_name: str | None = None,
        mode: str = "mount",
        path_on_datastore: str | None = None,
        path_on_compute: str | None = None,
        overwrite: bool = False,
    ) -> None:
        self.datastore_name = datastore_name
        self.mode = mode
        self.path_on_datastore = path_on_datastore
        self.path_on_compute = path_on_compute
        self.overwrite = overwrite


class HistoryConfiguration(Strict):
    """Settings for stored files, without effect: Paceline always stores outputs and the source."""

    def __init__(self) -> None:
        self.output_collection = True
        self.snapshot_project = True
        self.directories_to_watch = ["logs"]


class SparkConfiguration(Strict):
    """Settings for Spark, accepted without effect."""

    def __init__(self) -> None:
        self.configuration: dict[str, object] = {}


class _Vm(Strict):
    """Machine sizes, accepted without effect."""

    def __init__(self) -> None:
        self.vm_size: str | None = None
        self.vm_priority: str | None = None
        self.retain_cluster = False
        self.name: str | None = None
        self.cluster_max_node_count = 1
        self.location: str | None = None


class _Container(Strict):
    """Settings for Azure's container instances of 2018, accepted without effect."""

    def __init__(self) -> None:
        self.region: str | None = None
        self.cpu_cores: float = 1
        self.memory_gb: float = 4


class RunConfiguration(Strict):
    """The settings of a run, stored in `ScriptRunConfig.run_config`.

    Every attribute may be set until the run is submitted. Setting an unknown attribute raises AttributeError.

    Args:
        framework: "Python", "PyTorch" or "TensorFlow".
        communicator: "None", "IntelMpi" or "OpenMpi" (both Open MPI), "Nccl", "Gloo" or "ParameterServer".
    """

    _ignored = ("auto_prepare_environment", "prepare_environment")

    def __init__(
        self,
        script: str | None = None,
        arguments: Sequence[object] | None = None,
        framework: str | None = None,
        communicator: str | None = None,
        conda_dependencies: CondaDependencies | None = None,
        command: str | Sequence[object] | None = None,
        _history_enabled: bool | None = None,
        _path: str | None = None,
        _name: str | None = None,
    ) -> None:
        self.script = script
        self.arguments: object = list(arguments) if isinstance(arguments, (list, tuple)) else arguments or []
        self.command = command
        self.framework = framework or "Python"
        self.communicator = communicator or "None"
        self._target = "local"
        self.max_run_duration_seconds: int | None = None
        self.node_count = 1
        self.instance_types: list[str] = []
        self.priority: int | None = None
        self.environment = Environment("default-environment")
        if conda_dependencies is not None:
            self.environment.python.conda_dependencies = conda_dependencies
        self.history = HistoryConfiguration()
        self.docker = DockerConfiguration()
        self.spark = SparkConfiguration()
        self.hdi: object = None
        self.tensorflow = TensorflowConfiguration()
        self.mpi = MpiConfiguration()
        self.pytorch = PyTorchConfiguration()
        self.paralleltask = ParallelTaskConfiguration()
        self.data_references: dict[str, object] = {}
        self.data: dict[str, object] = {}
        self.datacaches: list[object] = []
        self.output_data: dict[str, object] = {}
        self.environment_variables: dict[str, str] = {}
        self.amlcompute = _Vm()
        self.kubernetescompute = _Vm()
        self.container_instance = _Container()
        self.services: dict[str, object] = {}
        self.source_directory_data_store: str | None = None
        self.credential_passthrough = False

    @property
    def target(self) -> str:
        """The compute target's name. A target or a name may be assigned."""
        return self._target

    @target.setter
    def target(self, target: Any) -> None:
        self._target = "local" if target is None else getattr(target, "name", target)

    def save(self, path: str | None = None, name: str | None = None, separate_environment_yaml: bool = False) -> None:
        """Write `<path>/.azureml/<name>.runconfig` and conda_dependencies.yml."""
        import yaml

        folder = _folder(Path(path or "."))
        folder.mkdir(parents=True, exist_ok=True)
        dependencies = self.environment.python.conda_dependencies
        (folder / f"{name or 'default'}.runconfig").write_text(yaml.safe_dump(self._saved(), sort_keys=False))
        if dependencies is not None:
            dependencies.save(str(folder / "conda_dependencies.yml"))

    @staticmethod
    def load(path: str, name: str | None = None) -> RunConfiguration:
        """Return a configuration that `save` or the SDK has written.

        `path` is a .runconfig file, or a folder that contains `.azureml/<name>.runconfig`.

        Raises:
            UserErrorException: The file does not exist or is not YAML.
        """
        import yaml

        place = Path(path)
        file = place if place.is_file() else _folder(place) / f"{name or 'default'}.runconfig"
        if not file.is_file():
            raise UserErrorException(f"there is no run configuration {str(file)!r}.")
        try:
            data = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserErrorException(f"the run configuration {str(file)!r} can't be read: {error}.") from error
        return _loaded(data, file.parent)

    @staticmethod
    def delete(path: str, name: str) -> None:
        """Remove the file that `save` has written."""
        (_folder(Path(path)) / f"{name}.runconfig").unlink(missing_ok=True)

    def _saved(self) -> dict[str, object]:
        data: dict[str, Any] = {}
        for name in _SAVED:
            there, here, last = _place(name, data, self)
            value = getattr(here, last)
            # Convert other mappings, such as os.environ, to dicts, because the YAML writer accepts only dicts.
            there[camel_case(last)] = dict(value) if isinstance(value, Mapping) else value
        dependencies = self.environment.python.conda_dependencies
        data["environment"]["python"]["condaDependenciesFile"] = "conda_dependencies.yml" if dependencies else None
        return data


#: Attributes that a .runconfig file contains. A key in the file is the name in camel case, and a dot begins a section.
_SAVED = (
    *("script", "arguments", "target", "framework", "communicator", "max_run_duration_seconds", "node_count"),
    *("environment.name", "environment.python.interpreter_path", "environment.python.user_managed_dependencies"),
    *("environment.environment_variables", "environment.docker.enabled", "environment.docker.base_image"),
    *("mpi.process_count_per_node", "tensorflow.worker_count", "tensorflow.parameter_server_count"),
    *("pytorch.communication_backend", "pytorch.process_count"),
)


def _place(name: str, data: dict[str, Any], config: RunConfiguration) -> tuple[dict[str, Any], Any, str]:
    """Find a setting such as "environment.docker.enabled", to change it in a file and in `config`.

    Returns:
        The section of the file's `data`, created if missing; the section of `config`; the name's last part ("enabled").
    """
    *sections, last = name.split(".")
    there, here = data, config
    for section in sections:
        key = camel_case(section)
        there[key] = there.get(key) or {}
        there, here = there[key], getattr(here, section)
    return there, here, last


def set_distribution(config: RunConfiguration, distributed: object) -> None:
    """Copy the settings of a distributed job, such as an MpiConfiguration, into a run configuration.

    Raises:
        RunConfigurationException: `distributed` is not a distributed configuration.
    """
    if distributed is None:
        return
    if isinstance(distributed, MpiConfiguration):
        config.mpi, config.node_count, config.communicator = distributed, distributed.node_count, "IntelMpi"
    elif isinstance(distributed, PyTorchConfiguration):
        config.pytorch, config.node_count, config.framework = distributed, distributed.node_count, "PyTorch"
        config.communicator = distributed.communication_backend
    elif isinstance(distributed, TensorflowConfiguration):
        config.tensorflow, config.framework = distributed, "TensorFlow"
        config.node_count, config.communicator = distributed.worker_count, "ParameterServer"
    elif isinstance(distributed, ParallelTaskConfiguration):
        config.paralleltask = distributed
    else:
        raise RunConfigurationException(
            f"distributed_job_config={distributed!r} must be an MpiConfiguration, PyTorchConfiguration or "
            "TensorflowConfiguration."
        )


def _folder(path: Path) -> Path:
    old = path / "aml_config"
    return old if old.is_dir() and not (path / ".azureml").is_dir() else path / ".azureml"


def _loaded(data: dict[str, Any], folder: Path) -> RunConfiguration:
    config = RunConfiguration()
    for name in _SAVED:
        there, here, last = _place(name, data, config)
        # Skip empty values, which mean the default. Keep 0, because a run may have zero parameter servers.
        if (value := there.get(camel_case(last))) or value == 0:
            setattr(here, last, value)
    # Convert names and values to text, because YAML reads `2020` as a number and `yes` as a bool.
    environment = config.environment
    environment.name = str(environment.name)
    variables = environment.environment_variables or {}
    environment.environment_variables = {str(key): str(value) for key, value in variables.items()}
    if file := data["environment"]["python"].get("condaDependenciesFile"):
        # The path may be relative to the project's folder, or to the folder of the file.
        places = [folder / file, folder.parent / file, folder / Path(file).name]
        found = next((place for place in places if place.is_file()), places[0])
        environment.python.conda_dependencies = CondaDependencies(str(found))
    return config
