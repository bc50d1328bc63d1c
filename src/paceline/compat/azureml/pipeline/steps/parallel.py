"""A script's `run(mini_batch)` over a whole dataset (ParallelRunStep).

https://learn.microsoft.com/python/api/azureml-pipeline-steps/azureml.pipeline.steps.parallelrunstep
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.core.runconfig import RunConfiguration
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig, argument_list
from paceline.compat.azureml.data.output_dataset_config import OutputFileDatasetConfig
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.parallel_run.batches import ParallelRunSettings
from paceline.compat.azureml.pipeline.core.builder import PipelineData, PipelineStep
from paceline.compat.azureml.pipeline.filling import Filling
from paceline.data import DataReference
from paceline.pipelines import Planned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import Workspace

__all__ = ["ParallelRunConfig", "ParallelRunStep"]

_MODULE = "paceline.compat.azureml.parallel_run"
_ACTIONS = ("append_row", "summary_only")
_SIZE = re.compile(r"(\d+)\s*(B|KB|MB|GB)?", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
#: Default size of a mini-batch: number of files of a file dataset, amount of data of a table.
_FILES, _BYTES = 10, "1MB"


@sdk_class
@dataclasses.dataclass(eq=False, repr=False)
class ParallelRunConfig:
    """The settings of a ParallelRunStep.

    The script defines `run(mini_batch)`, and optionally `init()` and `shutdown()`.

    Args:
        error_threshold: Number of files or rows that may fail before the step fails; -1 for any number.
        allowed_failed_count, allowed_failed_percent: How many mini-batches may fail before the step fails.
        output_action: "append_row" appends run()'s results to a file in the output, in the order of the mini-batches.
            "summary_only" only counts the results.
        append_row_file_name: Name of the file for "append_row"; default: parallel_run_step.txt.
        mini_batch_size: Number of files (default 10), or approximate size of a table ("1MB").
        process_count_per_node: Number of workers on each node; default: 1.
        partition_keys: Columns of a table, or names in the partition_format of files. Each combination of the keys'
            values is a mini-batch; mini_batch_size is ignored.
        run_invocation_timeout: Time limit for a call of run(), in seconds.
        run_max_try: Maximum number of attempts for each mini-batch.
        description: Accepted without effect.

    node_count, process_count_per_node, mini_batch_size, error_threshold, run_invocation_timeout, run_max_try and
    logging_level may each be a PipelineParameter.

    Raises:
        UserErrorException: A value is wrong.
    """

    environment: Environment | None
    entry_script: str
    error_threshold: int
    output_action: str
    compute_target: object
    node_count: int
    process_count_per_node: int | None = None
    mini_batch_size: object = None
    source_directory: str | None = None
    description: str | None = None
    logging_level: str = "INFO"
    run_invocation_timeout: int = 60
    run_max_try: int = 3
    append_row_file_name: str | None = None
    allowed_failed_count: int | None = None
    allowed_failed_percent: float | None = None
    partition_keys: object = None
    environment_variables: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.entry_script, str) or not self.entry_script.endswith(".py"):
            raise UserErrorException(f"entry_script={self.entry_script!r} is not a Python file.")
        if self.output_action not in _ACTIONS:
            raise UserErrorException(f"output_action={self.output_action!r} must be one of {', '.join(_ACTIONS)}.")
        name = self.append_row_file_name
        if name is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+", str(name)):
            raise UserErrorException(f"append_row_file_name={name!r} is not a file name.")
        self.environment_variables = dict(self.environment_variables or {})


@sdk_class
class ParallelRunStep(PipelineStep):
    """A step that distributes mini-batches among the workers of a run.

    Args:
        inputs: Datasets or other steps' outputs; either all files or all tables.
        output: The output to which the results are written. `arguments` may contain this output too.
        side_inputs: Data for the script's arguments, not split into mini-batches.
        arguments: Arguments of the script.

    Raises:
        UserErrorException: There are no inputs, no ParallelRunConfig, or a value is wrong.
    """

    def __init__(
        self,
        name: str,
        parallel_run_config: ParallelRunConfig,
        inputs: object,
        output: object = None,
        side_inputs: Sequence[object] | None = None,
        arguments: object = None,
        allow_reuse: bool = True,
    ) -> None:
        if not isinstance(parallel_run_config, ParallelRunConfig):
            raise UserErrorException(f"parallel_run_config={parallel_run_config!r} must be a ParallelRunConfig.")
        inputs = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        if not inputs or inputs == [None]:
            raise UserErrorException(f"step {name!r} has no inputs. Give at least one.")
        if output is not None and not isinstance(output, (PipelineData, OutputFileDatasetConfig)):
            raise UserErrorException(f"output={output!r} must be a PipelineData or an OutputFileDatasetConfig.")
        if output is None and parallel_run_config.output_action == "append_row":
            raise UserErrorException("output_action='append_row' needs an output= for the file of rows.")
        self._config, self._side_inputs = parallel_run_config, list(side_inputs or ())
        super().__init__(name, inputs, [] if output is None else [output], arguments)
        self.allow_reuse = bool(allow_reuse)

    def _values(self) -> list[object]:
        return [*super()._values(), self._side_inputs, list(vars(self._config).values())]

    def _configuration(self, filling: Filling, source_directory: str | None) -> ScriptRunConfig:
        config, run = self._config, RunConfiguration()
        run.target = config.compute_target
        if config.environment is not None:
            run.environment = config.environment
        run.environment_variables = dict(config.environment_variables or {})
        nodes = _number("node_count", filling.value(config.node_count), 1)
        per_node = _number("process_count_per_node", filling.value(config.process_count_per_node) or 1, 1)
        # Start plain processes, because the script joins no process group. So it may use any framework.
        run.communicator, run.node_count, run.pytorch.process_count = "Gloo", nodes, nodes * per_node
        directory = config.source_directory or source_directory or "."
        if not (Path(directory) / config.entry_script).is_file():
            raise UserErrorException(f"entry_script={config.entry_script!r} is not in {str(directory)!r}.")
        return ScriptRunConfig(directory, config.entry_script, list(self.arguments), run)

    def _filled(self, filling: Filling, source_directory: str | None) -> ScriptRunConfig:
        inputs = [_as_folder(filling, value) for value in self.inputs]
        made = filling.config(
            self._configuration(filling, source_directory), [*inputs, *self._side_inputs, *self._outputs()]
        )
        made.run_config.arguments = [self._settings(filling, inputs).text(), *argument_list(made.run_config.arguments)]
        return made

    def planned(
        self, workspace: Workspace, run_id: str, parameters: Mapping[str, object], source_directory: str | None
    ) -> Planned:
        found: Planned = super().planned(workspace, run_id, parameters, source_directory)
        job = dataclasses.replace(found.job, entry_script="", entry_module=_MODULE)
        return dataclasses.replace(found, job=job)

    def _settings(self, filling: Filling, inputs: list[DataReference]) -> ParallelRunSettings:
        config = self._config
        files = tuple(one.name for one in inputs if one.mode != "direct")
        tables = tuple(one.name for one in inputs if one.mode == "direct")
        if files and tables:
            raise UserErrorException(
                f"step {self.name!r} has files ({files[0]!r}) and tables ({tables[0]!r}) as inputs. Use two steps."
            )
        keys = _keys(filling.value(config.partition_keys))
        formats = {
            one.name: _format(self.name, one.name, filling.value(value), keys)
            for one, value in zip(inputs, self.inputs, strict=True)
            if keys and one.mode != "direct"
        }
        size = filling.value(config.mini_batch_size)
        count, percent = config.allowed_failed_count, config.allowed_failed_percent
        file = config.append_row_file_name or "parallel_run_step.txt"
        return ParallelRunSettings(
            entry=config.entry_script,
            files=files,
            tables=tables,
            keys=keys,
            formats=formats,
            batch_size=_number("mini_batch_size", size or _FILES, 1) if files else _bytes(size or _BYTES),
            timeout_s=_number("run_invocation_timeout", filling.value(config.run_invocation_timeout), 1),
            tries=_number("run_max_try", filling.value(config.run_max_try), 1),
            error_threshold=_number("error_threshold", filling.value(config.error_threshold), -1),
            failed_batches=-1 if count is None else _number("allowed_failed_count", count, -1),
            failed_percent=-1.0 if percent is None else float(percent),
            output=next((one.name for one in self._outputs()), None),
            file=file if config.output_action == "append_row" else None,
            logging_level=str(filling.value(config.logging_level)),
        )


def _as_folder(filling: Filling, value: object) -> DataReference:
    """Return a data reference to an input: for files a folder, for tables a dataset."""
    filled = filling.value(value)
    reference = filling.reference(filled)
    if reference is None:
        raise UserErrorException(f"the inputs of a step have {value!r}, which is not data.")
    # The reference to an unnamed dataset does not say whether the dataset is a table, so check the dataset itself.
    dataset = getattr(filled, "dataset", filled)
    if reference.table is not None or hasattr(dataset, "to_pandas_dataframe"):
        if reference.mode == "direct":
            return reference
        found = filling.reference(dataset.as_named_input(reference.name))
        assert found is not None, "a dataset is data"
        return found
    return dataclasses.replace(reference, mode="mount") if reference.mode == "direct" else reference


def _keys(given: object) -> tuple[str, ...]:
    """Return partition_keys from a list, or from a PipelineParameter's JSON."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = given
    if found is not None and not (isinstance(found, (list, tuple)) and all(isinstance(key, str) for key in found)):
        raise UserErrorException(f"partition_keys={given!r} must be a list of names.")
    return tuple(found or ())


def _format(step: str, name: str, value: object, keys: tuple[str, ...]) -> str:
    """Return a file input's partition_format, which must contain the keys."""
    dataset = getattr(value, "dataset", value)
    known = getattr(dataset, "partition_keys", [])
    if unknown := [key for key in keys if key not in known]:
        raise UserErrorException(
            f"step {step!r} makes mini-batches by {unknown[0]!r}, a key missing in the paths of the input {name!r}; its "
            f"partition_keys are {known}. Name it: Dataset.File.from_files(..., partition_format='/{{{unknown[0]}}}/*')."
        )
    return str(getattr(dataset, "reading", {})["partition_format"])


def _number(name: str, value: Any, least: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = least - 1
    if number < least or isinstance(value, bool):
        raise UserErrorException(f"{name}={value!r} must be {least} or more.")
    return number


def _bytes(value: object) -> int:
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or not int(match[1]):
        raise UserErrorException(f"mini_batch_size={value!r} of a table must be a size such as '1MB' or 1024.")
    return int(match[1]) * _UNITS[(match[2] or "B").upper()]
