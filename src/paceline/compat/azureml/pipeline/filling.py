"""Substitution of parameters and data in a step's configuration, for a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline import PipelineData
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig, argument_list
from paceline.compat.azureml.data.data_reference import DataPath, DatasetConsumptionConfig
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.pipeline.core.graph import PipelineParameter
from paceline.data import DataReference
from paceline.pipelines import PendingReference

if TYPE_CHECKING:
    from paceline import Workspace


class Filling:
    """The values that replace parameters and data in a step run's configuration.

    Args:
        run_id: Id of the step's run.
        parameters: Maps the names of pipeline parameters to values.
        outputs: The outputs of the step.
    """

    def __init__(
        self, workspace: Workspace, run_id: str, parameters: Mapping[str, object], outputs: Iterable[object]
    ) -> None:
        self.workspace = workspace
        self._run_id = run_id
        self._parameters = parameters
        self._outputs = list(outputs)

    def value(self, value: object) -> Any:
        """Return the value with pipeline parameters and data substituted."""
        if isinstance(value, PipelineParameter):
            given = self._parameters.get(value.name, value.default_value)
            return given.create_data_reference(value.name) if isinstance(given, DataPath) else self.value(given)
        # The value is a pair (parameter, binding). The parameter is a DataPath. The binding says how the step gets the path.
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], PipelineParameter):
            path = self._parameters.get(value[0].name, value[0].default_value)
            if not isinstance(path, DataPath):
                raise UserErrorException(f"the parameter {value[0].name!r} is {path!r}, which is not a DataPath.")
            return path.create_data_reference(value[0].name, value[1])
        if isinstance(value, DatasetConsumptionConfig) and isinstance(value.dataset, PipelineParameter):
            dataset = self._parameters.get(value.dataset.name, value.dataset.default_value)
            return DatasetConsumptionConfig(value.name, dataset, value.mode, value.path_on_compute)
        if isinstance(value, PipelineData):
            is_left = any(one is value for one in self._outputs)
            return value.left(self.workspace, self._run_id) if is_left else value.as_mount()  # type: ignore[attr-defined]
        if isinstance(value, PendingReference) and any(one is value.data for one in self._outputs):
            return value.data.left(self.workspace, self._run_id)
        return value

    def words(self, values: object) -> list[Any]:
        return [self.value(one) for one in argument_list(values)]

    def config(self, config: ScriptRunConfig, data: Iterable[object]) -> ScriptRunConfig:
        """Return a copy of `config` with all parameters and data substituted.

        `data` are the step's inputs and outputs. Each becomes a data reference, unless an argument has it already.
        """
        made = config.settled()
        run = made.run_config
        run.arguments = self.words(run.arguments)
        if isinstance(run.command, list):
            run.command = [self.value(one) for one in run.command]
        # Skip data references that are already in the arguments.
        words = [*run.arguments, *(run.command if isinstance(run.command, list) else ())]
        there = {reference.name for reference in map(self.reference, words) if reference is not None}
        references = dict(run.data_references)
        for value in data:
            reference = self.reference(self.value(value))
            if reference is None:
                raise UserErrorException(f"the inputs or outputs of a step have {value!r}, which is not data.")
            if reference.name not in there:
                references[reference.name] = reference
        run.data_references = references
        run.environment_variables = {
            name: self.value(value) for name, value in (run.environment_variables or {}).items()
        }
        return made

    def reference(self, value: object) -> DataReference | None:
        """Return an SDK data object as a DataReference, or None for other values."""
        from paceline.compat.azureml.submission import reference_of

        return reference_of(value, self.workspace, self._run_id)


def flat_values(values: object) -> Iterator[Any]:
    """Yield the values in nested lists, tuples and dicts; for an input, also its dataset."""
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
