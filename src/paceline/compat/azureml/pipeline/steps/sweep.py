"""A sweep as a step (`azureml.pipeline.steps.HyperDriveStep`).

https://learn.microsoft.com/python/api/azureml-pipeline-steps/azureml.pipeline.steps.hyperdrivestep
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.compat.azureml.core.runconfig import RunConfiguration
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig, argument_list
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.pipeline.core.builder import PipelineData, PipelineStep
from paceline.compat.azureml.pipeline.core.graph import TrainingOutput
from paceline.compat.azureml.pipeline.filling import Filling
from paceline.compat.azureml.train.hyperdrive.runconfig import HyperDriveConfig
from paceline.pipelines import Planned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline import Workspace

__all__ = ["HyperDriveStep"]

#: Folder with the script that copies the sweep's results to the step's outputs.
_SCRIPTS = Path(__file__).parent / "scripts"


@sdk_class
class HyperDriveStep(PipelineStep):
    """A step that runs a sweep.

    After the sweep has completed, an extra step named `<name> outputs` stores the sweep's results.

    Args:
        estimator_entry_script_arguments: Arguments of each trial's script, in addition to the hyperparameters.
        metrics_output: A PipelineData for all trials' metrics, as JSON.
        outputs: PipelineData, each with a TrainingOutput that selects a part of the results.

    Raises:
        UserErrorException: The HyperDriveConfig is missing, or an item of `outputs` has no TrainingOutput.
    """

    def __init__(
        self,
        name: str,
        hyperdrive_config: HyperDriveConfig,
        estimator_entry_script_arguments: object = None,
        inputs: Iterable[object] | None = None,
        outputs: Sequence[PipelineData] | None = None,
        metrics_output: PipelineData | None = None,
        allow_reuse: bool = True,
        version: str | None = None,
    ) -> None:
        if not isinstance(hyperdrive_config, HyperDriveConfig):
            raise UserErrorException(f"hyperdrive_config={hyperdrive_config!r} must be a HyperDriveConfig.")
        wanted = [(data, _training_output(data)) for data in outputs or ()]
        if metrics_output is not None:
            wanted.append((metrics_output, TrainingOutput("Metrics")))
        super().__init__(name, inputs, None, estimator_entry_script_arguments)
        self.hyperdrive_config, self.allow_reuse = hyperdrive_config, bool(allow_reuse)
        if wanted:
            self.followers = [SweepOutputs(self, wanted)]

    def planned(
        self, workspace: Workspace, run_id: str, parameters: Mapping[str, object], source_directory: str | None
    ) -> Planned:
        filling = Filling(workspace, run_id, parameters, ())

        def change(config: ScriptRunConfig) -> ScriptRunConfig:
            made = config.settled()
            if self.arguments:
                made.run_config.arguments = [*argument_list(made.run_config.arguments), *self.arguments]
            return filling.config(made, self.inputs)

        found, spec = self.hyperdrive_config.prepared(workspace, change)
        return Planned(
            name=self.name, job=found.job, directory=found.source_directory, sweep=spec.to_json(), warnings=found.notes
        )


class SweepOutputs(PipelineStep):
    """A step on this machine that stores a sweep's results from the trials' folders."""

    def __init__(self, sweep: HyperDriveStep, wanted: list[tuple[PipelineData, TrainingOutput]]) -> None:
        words: list[object] = ["--step", sweep.name]
        for data, output in wanted:
            words += ["--metrics", data] if output.type == "Metrics" else ["--model", data, output.model_file or ""]
        super().__init__(f"{sweep.name} outputs", None, [data for data, _ in wanted], words)
        # Never reuse outputs of an earlier pipeline run, because they belong to the sweep of that pipeline run.
        self.allow_reuse = False
        self.run_after(sweep)

    def _configuration(self, filling: Filling, source_directory: str | None) -> ScriptRunConfig:
        run = RunConfiguration()
        run.environment.python.user_managed_dependencies = True
        return ScriptRunConfig(str(_SCRIPTS), "leave_sweep_outputs.py", list(self.arguments), run)


def _training_output(data: object) -> TrainingOutput:
    found = getattr(data, "training_output", None)
    if not isinstance(data, PipelineData) or not isinstance(found, TrainingOutput):
        raise UserErrorException(
            f"{data!r} among the outputs of a HyperDriveStep would be written by each trial. Select a result of the sweep: "
            "PipelineData(name, training_output=TrainingOutput(type='Model', model_file='outputs/model.pkl'))."
        )
    return found
