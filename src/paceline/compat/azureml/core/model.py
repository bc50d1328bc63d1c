"""Registered models and their deployment (`azureml.core.model`).

https://learn.microsoft.com/python/api/azureml-core/azureml.core.model.model
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import paceline
from paceline.compat.azureml.core.dataset import Dataset
from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.exceptions import (
    ModelNotFoundException,
    ModelPathNotFoundException,
    UserErrorException,
    WebserviceException,
    sdk_class,
)
from paceline.compat.azureml.records import late
from paceline.errors import ModelError, RunNotFoundError
from paceline.errors import ModelNotFoundError as NotFound

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

    from paceline import Workspace
    from paceline.compat.azureml.core.run import Run

__all__ = ["Dataset", "InferenceConfig", "Model", "ModelNotFoundException", "ResourceConfiguration"]


class Framework:
    """Names of model frameworks, for `Model.register`."""

    CUSTOM = "Custom"
    TENSORFLOW = "TensorFlow"
    SCIKITLEARN = "ScikitLearn"
    ONNX = "Onnx"
    TFKERAS = "TfKeras"
    PYTORCH = "PyTorch"
    MULTI = "Multi"


@sdk_class
class Model(paceline.Model):
    """A registered model: the latest version, unless id or version selects another version.

    Raises:
        WebserviceException: The model does not exist. The message contains ModelNotFound.
    """

    Framework = Framework

    def __init__(
        self,
        workspace: Workspace,
        name: str | None = None,
        id: str | None = None,
        tags: object = None,
        properties: Mapping[str, object] | None = None,
        version: int | None = None,
        run_id: str | None = None,
        model_framework: str | None = None,
        **others: object,
    ) -> None:
        if not name and not id:
            raise WebserviceException("Model: give a name or an id.")
        try:
            if tags or properties or run_id:
                found = [
                    one for one in _listed(workspace, name, tags, properties, run_id) if version in (None, one.version)
                ]
                if not found:
                    raise NotFound(f"there is no model {name or id!r} with these tags, properties and run.")
                super().__init__(workspace, found[0].id)
            else:
                super().__init__(workspace, str(id or name), version=version)
        except NotFound as error:
            raise WebserviceException(f"ModelNotFound: {error}", status_code=404) from error

    @property
    def url(self) -> str:
        return f"aml://asset/{self.id}"

    @property
    def created_time(self) -> dt.datetime:
        import datetime as dt

        return dt.datetime.fromisoformat(self.created_utc.replace("Z", "+00:00"))

    @property
    def model_framework(self) -> str | None:
        return self.framework

    @property
    def experiment_name(self) -> str | None:
        return None if self.run is None else self.run.experiment.name

    @staticmethod
    def register(  # type: ignore[override]
        workspace: Workspace,
        model_path: str,
        model_name: str,
        tags: object = None,
        properties: Mapping[str, object] | None = None,
        description: str | None = None,
        datasets: Sequence[tuple[str, object]] | None = None,
        model_framework: str | None = None,
        model_framework_version: str | None = None,
        child_paths: object = None,
        **others: object,
    ) -> Model:
        """Register a file or folder as a model's next version.

        Return the model. The function prints `Registering model <name>`, as the SDK does.

        Raises:
            WebserviceException: The name is not valid, or the path does not exist.
        """
        print(f"Registering model {model_name}")
        made = paceline.Model.register(
            workspace,
            model_path,
            model_name,
            _tags(tags),
            properties,
            description,
            datasets,
            model_framework,
            model_framework_version,
        )
        return Model(workspace, id=made.id)

    @staticmethod
    def list(  # type: ignore[override]
        workspace: Workspace,
        name: str | None = None,
        tags: object = None,
        properties: Mapping[str, object] | None = None,
        run_id: str | None = None,
        latest: bool = False,
        dataset_id: str | None = None,
        expand: bool = True,
        page_count: int = 255,
        model_framework: str | None = None,
    ) -> Sequence[Model]:
        """Return the model versions with this name, tags and so on, newest first."""
        found = _listed(workspace, name, tags, properties, run_id, latest)
        return [Model(workspace, id=one.id) for one in found if model_framework in (None, one.framework)]

    def download(self, target_dir: str = ".", exist_ok: bool = False, exists_ok: object = None) -> str:  # type: ignore[override]
        """Copy the model's file or folder into a folder and return its path.

        Raises:
            WebserviceException: The target exists and exist_ok=False.
        """
        return super().download(target_dir, exist_ok=bool(exist_ok or exists_ok))

    @staticmethod
    def get_model_path(model_name: str, version: int | None = None, _workspace: Workspace | None = None) -> str:
        """Return the path of a model's file or folder.

        In a service this is the served model. In other programs it is in `azureml-models/<name>/<version>/`, copied
        from `_workspace` or the run's workspace if missing. Without a workspace the path is `./<name>`.

        Raises:
            ModelNotFoundException: There is no such model.
        """
        served = os.environ.get("AZUREML_MODEL_DIR")
        if served:
            # With several models, AZUREML_MODEL_DIR has a folder for each model. With one model, it is that model's folder.
            below = _version_folder(Path(served, model_name), version)
            return _only_entry(below or Path(served))
        if (folder := _version_folder(Path("azureml-models", model_name), version)) is not None:
            return _only_entry(folder)
        workspace = _workspace
        if workspace is None and hasattr(context := late("core.run", "Run").get_context(), "experiment"):
            workspace = context.experiment.workspace
        if workspace is not None:
            try:
                found = paceline.Model(workspace, model_name, version=version)
            except ModelError as error:
                raise ModelNotFoundException(f"ModelNotFound: {error}") from error
            return found.download(str(Path("azureml-models", model_name, str(found.version))), exist_ok=True)
        if os.path.exists(model_name):
            return model_name
        raise ModelNotFoundException(
            f"ModelNotFound: there is neither azureml-models/{model_name}/ nor {model_name!r} in {os.getcwd()!r}."
        )

    # --- deployment of models as a service

    @staticmethod
    def deploy(  # type: ignore[override]
        workspace: Workspace,
        name: str,
        models: Sequence[object],
        inference_config: InferenceConfig | None = None,
        deployment_config: object = None,
        deployment_target: object = None,
        overwrite: bool = False,
        show_output: bool = False,
    ) -> object:
        """Serve models under a name.

        The call does not wait for the service. `wait_for_deployment` of the result blocks until the service answers.

        Raises:
            WebserviceException: The name is taken or not valid, or the script does not exist.
        """
        return late("core.webservice", "deploy")(
            workspace, name, models, inference_config, deployment_config, overwrite=overwrite
        )

    @staticmethod
    def package(
        workspace: Workspace,
        models: Sequence[object],
        inference_config: InferenceConfig | None = None,
        generate_dockerfile: bool = False,
        image_name: str | None = None,
        image_label: str | None = None,
    ) -> object:
        """Return a folder from which a container image can be built.

        The result's method `save(path)` copies the folder, and `pull()` builds an image from the folder.

        Raises:
            WebserviceException: The model or script does not exist, or the environment can't be built on other machines.
        """
        tagged = f"{image_name}:{image_label}" if image_name and image_label else image_name
        return late("core.model_package", "package")(workspace, models, inference_config, image_name=tagged)

    @staticmethod
    def profile(*arguments: object, **named: object) -> NoReturn:
        """Raise WebserviceException: measure a deployed service with `paceline service bench` instead."""
        raise WebserviceException("Model.profile is not supported. Measure a service: paceline service bench NAME.")

    def serialize(self) -> dict[str, object]:
        return {
            "name": self.name,
            "version": self.version,
            "id": self.id,
            "framework": self.framework,
            "runId": self.run_id,
            "tags": dict(self.tags),
            "properties": dict(self.properties),
            "createdTime": self.created_utc,
            "description": self.description,
        }


class InferenceConfig:
    """A service's script, with `init()` and `run(data)`, and its environment.

    Args:
        entry_script: Path relative to source_directory, or to the working directory.
        runtime, conda_file: Options of old SDKs, which `environment` has replaced since SDK 1.0.
        enable_gpu, base_image, cuda_version, extra_docker_file_steps: Accepted without effect.

    Raises:
        WebserviceException: The script does not exist or is not Python, or environment is combined with runtime or
            conda_file.
    """

    def __init__(
        self,
        entry_script: str,
        runtime: str | None = None,
        conda_file: str | None = None,
        extra_docker_file_steps: str | None = None,
        source_directory: str | None = None,
        enable_gpu: bool | None = None,
        description: str | None = None,
        base_image: str | None = None,
        base_image_registry: object = None,
        cuda_version: str | None = None,
        environment: Environment | None = None,
    ) -> None:
        if environment is not None and (runtime is not None or conda_file is not None):
            raise WebserviceException("environment excludes runtime and conda_file. Put them into the environment.")
        if environment is not None and not isinstance(environment, Environment):
            raise UserErrorException(f"environment={environment!r} must be an Environment.")
        script = Path(source_directory or ".", entry_script)
        if not script.is_file():
            raise WebserviceException(f"entry_script {str(script)!r} does not exist.")
        if script.suffix != ".py":
            raise WebserviceException(f"entry_script {str(script)!r} is not a Python file.")
        self.entry_script, self.source_directory = entry_script, source_directory
        self.runtime, self.conda_file, self.description = runtime, conda_file, description
        self.environment = environment
        if environment is None and conda_file is not None:
            file = Path(source_directory or ".", conda_file)
            self.environment = Environment.from_conda_specification(
                "conda_file", str(file if file.is_file() else conda_file)
            )


def registered_of_run(run: Run, model_name: str, model_path: str | None, **given: Any) -> Model:
    """Register a run's file or folder as a model, and return the model.

    Raises:
        ModelPathNotFoundException: The run has no such file. The message lists the run's files.
    """
    from paceline import runs

    path = model_path or model_name
    while path.startswith("./"):
        path = path[2:]
    try:
        made = runs.Run.register_model(run, model_name, path.rstrip("/"), **given)
    except RunNotFoundError as error:
        raise ModelPathNotFoundException(str(error)) from error
    except ModelError as error:
        there = run.get_file_names()
        if not any(name == path or name.startswith(path.rstrip("/") + "/") for name in there):
            raise ModelPathNotFoundException(
                f"Could not locate the provided model_path {path} in the set of files uploaded to the run: {there}"
            ) from error
        raise WebserviceException(str(error)) from error
    return Model(run._workspace(), id=made.id)


def _listed(
    workspace: Workspace,
    name: str | None,
    tags: object,
    properties: Mapping[str, object] | None,
    run_id: str | None,
    latest: bool = False,
) -> list[paceline.Model]:
    """Return the models with this name, tags and so on. A tag's value None matches every value."""
    named = _tags(tags) or {}
    wanted = {key: value for key, value in named.items() if value is not None}
    found = paceline.Model.list(workspace, name, wanted or None, properties, run_id, latest)
    return [one for one in found if set(named) <= set(one.tags)]


def _tags(tags: object) -> Any:
    """Return tags as a dict. Convert a list of names or of pairs."""
    if isinstance(tags, (list, tuple)):
        return {tag[0]: tag[1] for tag in ((one if isinstance(one, (list, tuple)) else (one, None)) for one in tags)}
    return tags


def _version_folder(folder: Path, version: int | None) -> Path | None:
    if version is not None:
        return folder / str(version) if (folder / str(version)).is_dir() else None
    try:
        numbers = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    except OSError:
        return None
    return folder / str(max(numbers)) if numbers else None


def _only_entry(folder: Path) -> str:
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    if len(entries) != 1:
        raise ModelNotFoundException(
            f"ModelNotFound: {str(folder)!r} has {len(entries)} entries; it must hold exactly one model."
        )
    return str(entries[0])


class ResourceConfiguration:
    """The CPUs, memory (GB) and GPUs of a model's service."""

    def __init__(
        self, cpu: float | None = None, memory_in_gb: float | None = None, gpu: int | None = None, **others: object
    ) -> None:
        self.cpu, self.memory_in_gb, self.gpu = cpu, memory_in_gb, gpu
