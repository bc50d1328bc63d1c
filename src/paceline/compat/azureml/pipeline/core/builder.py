"""Steps, and the data that connects them (`azureml.pipeline.core.builder`).

https://learn.microsoft.com/python/api/azureml-pipeline-core/azureml.pipeline.core.pipelinedata
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import paceline
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig, argument_list
from paceline.compat.azureml.data.output_dataset_config import (
    OutputFileDatasetConfig,
    OutputTabularDatasetConfig,
    table_of,
)
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.pipeline.core.graph import PipelineParameter
from paceline.compat.azureml.pipeline.filling import Filling, flat_values
from paceline.compat.azureml.stores import real_name
from paceline.data import DataReference
from paceline.pipelines import PendingReference, Planned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline import Workspace
    from paceline.compat.azureml.data.output_dataset_config import Origin

__all__ = ["PipelineData", "PipelineStep", "StepSequence"]


@sdk_class
class PipelineData(paceline.PipelineData):
    """The output of a step, and an input of later steps.

    In arguments, a PipelineData becomes a path in an existing folder. The script creates a folder or file there.

    Args:
        datastore: Store of the files. Default: the workspace's default store.
        output_name: Name of the output in the step. Default: `name`.
        output_path_on_compute: An existing folder to which the script writes instead of the path in its arguments.
        output_overwrite: Whether existing files may be replaced.
        pipeline_output_name: Name for `PipelineRun.get_pipeline_output`.
        output_mode, data_type, is_directory: Accepted without effect.

    Raises:
        UserErrorException: The name is not valid.
    """

    def __init__(
        self,
        name: str,
        datastore: object = None,
        output_name: str | None = None,
        output_mode: str = "mount",
        output_path_on_compute: str | None = None,
        output_overwrite: bool | None = None,
        data_type: str | None = None,
        is_directory: bool | None = None,
        pipeline_output_name: str | None = None,
        training_output: object = None,
    ) -> None:
        super().__init__(output_name or name, datastore, path="azureml/{run}/{name}", overwrite=bool(output_overwrite))
        self.data_name = name
        self.pipeline_output_name = pipeline_output_name
        self.output_path_on_compute = output_path_on_compute
        self.training_output = training_output
        self.inside = None if output_path_on_compute else self.name

    @property
    def data_reference_name(self) -> str:
        return self.name

    def as_download(  # type: ignore[override]
        self, input_name: str | None = None, path_on_compute: str | None = None, overwrite: bool | None = None
    ) -> DataReference:
        """Return the data as an input copied to each node."""
        return self._found(input_name, "download", path_on_compute)

    def as_mount(self, input_name: str | None = None) -> DataReference:
        """Return the data as an input, mounted if the store is a local folder."""
        return self._found(input_name, "mount", None)

    def as_input(self, input_name: str | None = None) -> DataReference:
        """Return the data as an input under another name."""
        return self._found(input_name, "mount", None)

    def as_dataset(self) -> PipelineData:
        """Return the data itself: a later step receives its files."""
        return self

    def as_named_input(self, name: str) -> DataReference:
        """Return the data as an input under another name."""
        return self._found(name, "mount", None)

    def as_direct(self) -> DataReference:
        return self._found(None, "mount", None)

    def get_env_variable_name(self) -> str:
        """Return the environment variable that holds the path in a step."""
        return f"AZUREML_DATAREFERENCE_{self.name}"

    def create_input_binding(
        self,
        input_name: str | None = None,
        mode: str | None = None,
        path_on_compute: str | None = None,
        **others: object,
    ) -> DataReference:
        """Return the data as a mounted or downloaded input."""
        return self._found(input_name, mode or "mount", path_on_compute)

    def parse_delimited_files(
        self,
        include_path: bool = False,
        separator: str = ",",
        header: object = True,
        partition_format: str | None = None,
        file_extension: str = "",
        set_column_types: object = None,
        quoted_line_breaks: bool = False,
    ) -> OutputTabularDatasetConfig:
        """Return the data's CSV files as a table for a later step.

        `Dataset.Tabular.from_delimited_files` explains the options. file_extension and quoted_line_breaks have no
        effect: all files are read, and quoted values may always contain line breaks.
        """
        options = {"include_path": include_path, "separator": separator, "header": header}
        options |= {"partition_format": partition_format, "set_column_types": set_column_types}
        return table_of("from_delimited_files", self.name, self, options, inside=self.inside)

    def parse_parquet_files(
        self,
        include_path: bool = False,
        partition_format: str | None = None,
        file_extension: str = "",
        set_column_types: object = None,
    ) -> OutputTabularDatasetConfig:
        """Return the data's Parquet files as a table for a later step."""
        options = {"include_path": include_path, "partition_format": partition_format}
        return table_of(
            "from_parquet_files", self.name, self, {**options, "set_column_types": set_column_types}, inside=self.inside
        )

    def left(self, workspace: Workspace, run_id: str) -> DataReference:
        """Return the data reference by which a step's run stores the output."""
        made = copy.copy(self)
        made.datastore = real_name(workspace, self.datastore)
        found = made.destination(run_id, made.datastore)
        return found.as_upload(self.output_path_on_compute) if self.output_path_on_compute else found

    def _found(self, name: str | None, mode: str, path_on_compute: str | None) -> DataReference:
        mode = "download" if mode == "download" else "mount"
        return dataclasses.replace(
            super().as_mount(), name=name or self.name, mode=mode, path_on_compute=path_on_compute
        )


class StepSequence:
    """Steps that run one after the other, in the order of the list.

    The steps of a nested list run at the same time.
    """

    def __init__(self, steps: Sequence[object] | None = None) -> None:
        self.steps = list(steps or ())

    def __iter__(self) -> Iterator[object]:
        return iter(self.steps)

    def run_after(self, step: object) -> None:
        for one in flat_steps(self.steps):
            one.run_after(step)


class PipelineStep:
    """A step of a pipeline.

    A subclass defines the job of the step in `_configuration`.

    Raises:
        UserErrorException: The name or the arguments are not valid.
    """

    def __init__(
        self,
        name: str,
        inputs: Iterable[object] | None = None,
        outputs: Iterable[object] | None = None,
        arguments: object = None,
        fix_port_name_collisions: bool = False,
        resource_inputs: object = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise UserErrorException(f"a step's name must be a non-empty string, got {name!r}.")
        self.name = name
        self.inputs, self.outputs = list(inputs or ()), list(outputs or ())
        self.arguments = argument_list(arguments)
        self.allow_reuse = True
        self.source_directory: str | None = None
        self._after: list[PipelineStep] = []
        #: Steps that run after this step. A pipeline that contains this step also contains these steps.
        self.followers: list[PipelineStep] = []
        for data in self._given():
            data.producer = self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def run_after(self, step: object) -> None:
        """Make this step wait for a step, or for a StepSequence's steps."""
        self._after += flat_steps(step.steps if isinstance(step, StepSequence) else [step])

    @property
    def after(self) -> list[PipelineStep]:
        return self._after

    def needs(self) -> list[PipelineStep]:
        """Return the steps that must complete first.

        Raises:
            UserErrorException: An input is a PipelineData that no step has among its outputs.
        """
        own, found = {id(data) for data in self._given()}, list(self._after)
        for given in flat_values(self._values()):
            value = given.as_input() if isinstance(given, OutputTabularDatasetConfig) else given
            data = value if isinstance(value, PipelineData) else getattr(value, "data", None)
            if not isinstance(value, (PipelineData, PendingReference)) or id(data) in own:
                continue
            if (producer := getattr(data, "producer", None)) is None:
                raise UserErrorException(f"step {self.name!r} takes {value.name!r}, which is in no step's outputs=.")
            found.append(producer)
        return found

    def parameters(self) -> dict[str, object]:
        """Return the step's PipelineParameters: name -> default value."""
        return {
            one.name: one.default_value for one in flat_values(self._values()) if isinstance(one, PipelineParameter)
        }

    def planned(
        self, workspace: Workspace, run_id: str, parameters: Mapping[str, object], source_directory: str | None
    ) -> Planned:
        """Return the step's job and outputs for one run of the pipeline."""
        from paceline.compat.azureml.submission import prepared

        filling = Filling(workspace, run_id, parameters, self._outputs())
        found = prepared(self._filled(filling, source_directory), workspace, run_id=run_id)
        return Planned(
            name=self.name,
            job=found.job,
            directory=found.source_directory,
            gives=[(getattr(one, "origin", one), one.name) for one in self._outputs()],
            allow_reuse=self.allow_reuse,
            warnings=found.notes,
        )

    def _configuration(self, filling: Filling, source_directory: str | None) -> ScriptRunConfig:
        raise UserErrorException(f"a {type(self).__name__} can't be run here.")

    def _filled(self, filling: Filling, source_directory: str | None) -> ScriptRunConfig:
        return filling.config(self._configuration(filling, source_directory), [*self.inputs, *self._outputs()])

    def _values(self) -> list[object]:
        """Return the step's attributes that may contain data or pipeline parameters."""
        return [self.arguments, self.inputs, self.outputs]

    def _outputs(self) -> list[PipelineData | OutputFileDatasetConfig]:
        """Return the step's `outputs`, and each OutputFileDatasetConfig in its arguments."""
        found = [one for one in self.outputs if isinstance(one, (PipelineData, OutputFileDatasetConfig))]
        origins = {id(one.origin) for one in found if isinstance(one, OutputFileDatasetConfig)}
        for value in flat_values(self._values()):
            if isinstance(value, OutputFileDatasetConfig) and id(value.origin) not in origins:
                origins.add(id(value.origin))
                found.append(value)
        return found

    def _given(self) -> list[PipelineData | Origin]:
        """Return the objects by which other steps refer to this step's outputs."""
        return [one if isinstance(one, PipelineData) else one.origin for one in self._outputs()]


def flat_steps(steps: object) -> list[PipelineStep]:
    """Return the steps of nested lists and sequences as a flat list.

    The function also makes each item of a StepSequence depend on the preceding item.

    Raises:
        UserErrorException: An item is not a step.
    """
    found: list[PipelineStep] = []
    if isinstance(steps, PipelineStep):
        return [steps, *steps.followers]
    if not isinstance(steps, (Sequence, StepSequence)) or isinstance(steps, str):
        raise UserErrorException(f"{steps!r} must be a step.")
    before: list[PipelineStep] = []
    for one in steps:
        group = flat_steps(one)
        if isinstance(steps, StepSequence):
            for step in group:
                step._after += [other for other in before if other not in step._after]
            before = group
        found += group
    return found
