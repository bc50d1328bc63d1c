"""Parts of a pipeline graph (`azureml.pipeline.core.graph`).

https://learn.microsoft.com/python/api/azureml-pipeline-core/azureml.pipeline.core.graph.pipelineparameter
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import paceline
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.records import late
from paceline.compat.azureml.refused import InputPortDef, OutputPortDef
from paceline.data import DataReference

if TYPE_CHECKING:
    from paceline import Workspace
    from paceline.compat.azureml.core.datastore import Datastore
    from paceline.compat.azureml.data.data_reference import DatasetConsumptionConfig

__all__ = [
    "InputPortBinding",
    "InputPortDef",
    "OutputPortBinding",
    "OutputPortDef",
    "PipelineParameter",
    "PortDataReference",
    "TrainingOutput",
]


@sdk_class
class PipelineParameter(paceline.PipelineParameter):
    """A value set at submission: string, number, bool, DataPath or dataset.

    Raises:
        UserErrorException: The name is not valid, or the default has another type.
    """

    def __init__(self, name: str, default_value: object) -> None:
        if default_value is None or isinstance(default_value, (list, dict, set, tuple)):
            raise UserErrorException(
                f"the default of the parameter {name!r} is {default_value!r}; it must be a string, number, bool, "
                "DataPath or dataset."
            )
        super().__init__(name, default_value)

    # A parameter's value may be a dataset. With this method, functions that take a dataset accept a parameter as well.
    def as_named_input(self, name: str) -> DatasetConsumptionConfig:
        """Return the parameter's dataset as an input of this name."""
        from paceline.compat.azureml.data.data_reference import DatasetConsumptionConfig

        return DatasetConsumptionConfig(name, self)


class TrainingOutput:
    """A part of a sweep's results, which a HyperDriveStep stores in a PipelineData.

    Args:
        type: "Model" for a file or folder of the best trial, "Metrics" for JSON of all trials' metrics.
        model_file: Path of the file or folder. Default: the best trial's whole `outputs`.
        iteration, metric: Refused, because Paceline has no AutoML.

    Raises:
        UserErrorException: The type is unknown or belongs to AutoML.
    """

    def __init__(
        self, type: str, iteration: int | None = None, metric: str | None = None, model_file: str | None = None
    ) -> None:
        if type not in ("Model", "Metrics"):
            raise UserErrorException(f"type={type!r} of a TrainingOutput must be 'Model' or 'Metrics'.")
        if iteration is not None or metric is not None:
            raise UserErrorException(
                "iteration and metric are for AutoML. A sweep's best trial has the best primary metric."
            )
        if type == "Metrics" and model_file is not None:
            raise UserErrorException(f"model_file={model_file!r} belongs to the type 'Model'.")
        self.type, self.iteration, self.metric, self.model_file = type, iteration, metric, model_file


class InputPortBinding:
    """A named input of a step.

    The constructor takes `(name, bind_object=None, bind_mode="mount", ...)`. `bind_object` is a PipelineData, an
    OutputPortBinding, a DataReference, a PortDataReference or a dataset.

    Raises:
        UserErrorException: bind_object has another type.
    """

    def __new__(
        cls,
        name: str,
        bind_object: object = None,
        bind_mode: str = "mount",
        path_on_compute: str | None = None,
        **others: object,
    ) -> Any:
        if isinstance(bind_object, paceline.PipelineData):
            return bind_object.create_input_binding(name, bind_mode, path_on_compute=path_on_compute)  # type: ignore[attr-defined]
        if isinstance(bind_object, PortDataReference):
            bind_object = bind_object.as_mount()
        if isinstance(bind_object, DataReference):
            mode = "download" if bind_mode == "download" else "mount"
            return dataclasses.replace(bind_object, name=name, mode=mode, path_on_compute=path_on_compute)
        if not hasattr(bind_object, "as_named_input"):
            raise UserErrorException(
                f"bind_object={bind_object!r} of the input {name!r} must be data, such as a PipelineData."
            )
        return getattr(bind_object.as_named_input(name), "as_download" if bind_mode == "download" else "as_mount")()


class OutputPortBinding:
    """A PipelineData under another class name.

    The constructor takes `(name, datastore=None, output_name=None, bind_mode="mount", ...)`.
    """

    def __new__(
        cls,
        name: str,
        datastore: object = None,
        output_name: str | None = None,
        bind_mode: str = "mount",
        path_on_compute: str | None = None,
        is_directory: bool | None = None,
        overwrite: bool | None = None,
        data_type: str | None = None,
        pipeline_output_name: str | None = None,
        training_output: object = None,
        **others: object,
    ) -> Any:
        return late("pipeline.core.builder", "PipelineData")(
            name,
            datastore,
            output_name,
            output_path_on_compute=path_on_compute,
            output_overwrite=overwrite,
            pipeline_output_name=pipeline_output_name,
            training_output=training_output,
        )


class PortDataReference:
    """The files of a step's output in a datastore."""

    def __init__(self, context: Workspace, pipeline_run_id: str, data_reference: DataReference) -> None:
        self._workspace, self._run_id, self._reference = context, pipeline_run_id, data_reference

    @property
    def name(self) -> str:
        return str(self._reference.name)

    @property
    def path_on_datastore(self) -> str:
        """The path of the output's folder or file in the store."""
        path = self._reference.sources[0].path
        return f"{path}/{self._reference.inside}" if self._reference.inside else str(path)

    _path_on_datastore = path_on_datastore

    @property
    def datastore_name(self) -> str:
        return str(self._reference.sources[0].datastore)

    @property
    def datastore(self) -> Datastore:
        from paceline.compat.azureml.core.datastore import Datastore

        return Datastore.get(self._workspace, self.datastore_name)

    def download(self, local_path: str, overwrite: bool | None = None, show_progress: bool | None = None) -> int:
        """Copy the files to `local_path`, keeping the store's paths. Return their number."""
        count: int = self.datastore.download(
            local_path, self.path_on_datastore, bool(overwrite), show_progress is not False
        )
        return count

    def as_mount(self) -> DataReference:
        return self._reference

    def as_download(self, *arguments: object, **named: object) -> DataReference:
        return self._reference.as_download()
