"""The values of a step's configuration for one run of it: parameters have their values, data its places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.compat.azureml.core.script_run_config import ScriptRunConfig, argument_list
from paceline.compat.azureml.data.datapath import DataPath
from paceline.compat.azureml.data.dataset_consumption_config import DatasetConsumptionConfig
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.pipeline.core.graph import PipelineParameter
from paceline.job.data_reference import DataReference
from paceline.pipelines import data as native


class Filling:
    """run_id: of the step. parameters: name -> value. outputs: what the step leaves."""

    def __init__(self, workspace: Any, run_id: str, parameters: Mapping[str, Any], outputs: Iterable[Any]) -> None:
        self.workspace = workspace
        self._run_id = run_id
        self._parameters = parameters
        self._outputs = list(outputs)

    def value(self, value: Any) -> Any:
        """What stands in a configuration in place of this."""
        if isinstance(value, PipelineParameter):
            given = self._parameters.get(value.name, value.default_value)
            return given.create_data_reference(value.name) if isinstance(given, DataPath) else self.value(given)
        # (parameter, binding): a path that is given at submission, and how the step finds it.
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], PipelineParameter):
            path = self._parameters.get(value[0].name, value[0].default_value)
            if not isinstance(path, DataPath):
                raise UserErrorException(f"the parameter {value[0].name!r} is {path!r}, which is no DataPath.")
            return path.create_data_reference(value[0].name, value[1])
        if isinstance(value, DatasetConsumptionConfig) and isinstance(value.dataset, PipelineParameter):
            dataset = self._parameters.get(value.dataset.name, value.dataset.default_value)
            return DatasetConsumptionConfig(value.name, dataset, value.mode, value.path_on_compute)
        if isinstance(value, native.PipelineData):
            is_left = any(one is value for one in self._outputs)
            return value.left(self.workspace, self._run_id) if is_left else value.as_mount()  # type: ignore[attr-defined]
        if isinstance(value, native.PendingReference) and any(one is value.data for one in self._outputs):
            return value.data.left(self.workspace, self._run_id)
        return value

    def words(self, values: Any) -> list[Any]:
        """A list of arguments with all in its place."""
        return [self.value(one) for one in argument_list(values)]

    def config(self, config: ScriptRunConfig, data: Iterable[Any]) -> ScriptRunConfig:
        """A copy of the configuration with all in its place. data: what it takes or leaves beside its arguments."""
        made = config.settled()
        run = made.run_config
        run.arguments = self.words(run.arguments)
        if isinstance(run.command, list):
            run.command = [self.value(one) for one in run.command]
        # What stands in the words is known from there.
        words = [*run.arguments, *(run.command if isinstance(run.command, list) else ())]
        there = {reference.name for reference in map(self.reference, words) if reference is not None}
        references = dict(run.data_references)
        for value in data:
            reference = self.reference(self.value(value))
            if reference is None:
                raise UserErrorException(f"the inputs or outputs of a step have {value!r}, which is no data.")
            if reference.name not in there:
                references[reference.name] = reference
        run.data_references = references
        run.environment_variables = {
            name: self.value(value) for name, value in (run.environment_variables or {}).items()
        }
        return made

    def reference(self, value: Any) -> DataReference | None:
        """Data as a reference; None for anything else."""
        from paceline.compat.azureml.submission import reference_of

        return reference_of(value, self.workspace, self._run_id)


def flat_values(values: Any) -> Iterator[Any]:
    """All values in lists, tuples, dicts and what consumes a parameter."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for one in values:
            yield from flat_values(one)
    elif isinstance(values, DatasetConsumptionConfig):
        yield values
        yield values.dataset
    else:
        yield values
