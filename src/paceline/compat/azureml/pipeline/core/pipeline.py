"""Pipelines with the SDK's methods (`azureml.pipeline.core.pipeline`).

https://learn.microsoft.com/python/api/azureml-pipeline-core/azureml.pipeline.core.pipeline.pipeline
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.pipeline.core.builder import PipelineData, PipelineStep, flat_steps
from paceline.compat.azureml.records import late
from paceline.compat.azureml.refused import refuse
from paceline.pipelines import PipelineSpec, check_parameters, ordered, spec_of
from paceline.runs import check_run_id, new_run_id

if TYPE_CHECKING:
    import paceline
    from paceline import Workspace

__all__ = ["Pipeline"]


@sdk_class
class Pipeline:
    """Steps ordered by their data: a list, nested lists, or a StepSequence.

    The pipeline includes the steps on which the listed steps depend.

    Args:
        default_datastore: Store of each PipelineData without a datastore.
        default_source_directory: Source directory of each step without a source directory.

    Raises:
        UserErrorException: An item is not a step, the graph has a cycle, or an input has no step that produces it.
    """

    def __init__(
        self,
        workspace: Workspace,
        steps: object,
        description: str | None = None,
        default_datastore: object = None,
        default_source_directory: str | None = None,
        resolve_closure: bool = True,
        _workflow_provider: object = None,
        _service_endpoint: object = None,
        **kwargs: object,
    ) -> None:
        self.workspace = workspace
        self.description = description
        self._default_datastore = default_datastore
        self._default_source_directory = default_source_directory
        self.steps: list[PipelineStep] = ordered(flat_steps(steps), PipelineStep.needs, lambda step: step.name)
        if not self.steps:
            raise UserErrorException("a pipeline needs at least one step.")

    @property
    def parameters(self) -> dict[str, object]:
        """Return the PipelineParameters of all steps: name -> default value."""
        return {name: value for step in self.steps for name, value in step.parameters().items()}

    def validate(self) -> list[str]:
        """Check the pipeline. Return an empty list if it is valid.

        Raises:
            AzureMLException: The pipeline can't be submitted.
        """
        self._spec("check_0_00000000", self.parameters, regenerate_outputs=False)
        return []

    def submit(
        self,
        experiment_name: str,
        pipeline_parameters: Mapping[str, object] | None = None,
        continue_on_step_failure: bool | None = None,
        regenerate_outputs: bool = False,
        parent_run_id: str | None = None,
        credential_passthrough: bool | None = None,
        **kwargs: Any,
    ) -> paceline.PipelineRun:
        """Submit the pipeline to an experiment and return the PipelineRun."""
        experiment = late("core.experiment", "Experiment")(self.workspace, experiment_name)
        return self._submit_to(
            experiment,
            kwargs.pop("tags", None),
            pipeline_parameters=pipeline_parameters,
            continue_on_step_failure=continue_on_step_failure,
            regenerate_outputs=regenerate_outputs,
            **kwargs,
        )

    def _set_experiment_name(self, name: str) -> None:
        """Do nothing: the submission decides on the experiment."""

    def publish(self, *arguments: object, **named: object) -> NoReturn:
        """Raise ScenarioNotSupportedException: pipelines can't be published."""
        raise refuse("publish()")

    @staticmethod
    def load_yaml(workspace: Workspace, filename: str, *arguments: object, **named: object) -> NoReturn:
        """Raise ScenarioNotSupportedException: use docs/pipelines.md's file format."""
        raise refuse("load_yaml()")

    def _submit_to(
        self,
        experiment: paceline.Experiment,
        tags: Mapping[str, object] | None,
        *,
        pipeline_parameters: Mapping[str, object] | None = None,
        continue_on_step_failure: bool | None = None,
        regenerate_outputs: bool = False,
        display_name: str | None = None,
        run_id: str | None = None,
        **others: object,
    ) -> paceline.PipelineRun:
        from paceline.pipelines import submit_pipeline

        for accepted in ("credential_passthrough", "parent_run_id", "pipeline_params"):
            others.pop(accepted, None)
        if others:
            raise UserErrorException(f"submit can't take {', '.join(sorted(others))} with a Pipeline.")
        run_id = new_run_id(experiment.name) if run_id is None else check_run_id(run_id)
        parameters = check_parameters(self.parameters, dict(pipeline_parameters or {}))
        spec, directories = self._spec(
            run_id,
            parameters,
            regenerate_outputs=bool(regenerate_outputs),
            continue_on_step_failure=bool(continue_on_step_failure),
        )
        folder = submit_pipeline(
            spec,
            directories,
            experiment.workspace.path,
            experiment.name,
            run_id=run_id,
            tags=tags,
            display_name=display_name,
        )
        run: paceline.PipelineRun = late("pipeline.core.run", "PipelineRun")(experiment, folder.run_id)
        return run

    def _spec(self, run_id: str, parameters: Mapping[str, object], **values: object) -> tuple[PipelineSpec, list[Path]]:
        outputs: dict[str, object] = {}
        for step in self.steps:
            for data in step.outputs:
                if not isinstance(data, PipelineData):
                    continue
                if data.datastore is None and self._default_datastore is not None:
                    data.datastore = getattr(self._default_datastore, "name", self._default_datastore)
                if data.pipeline_output_name:
                    outputs[data.pipeline_output_name] = data
        return spec_of(
            self.steps,
            lambda step, child: step.planned(self.workspace, child, dict(parameters), self._default_source_directory),
            lambda step: step.after,
            run_id,
            outputs,
            parameters={name: _told(value) for name, value in parameters.items()},
            description=self.description,
            **values,
        )


def _told(value: object) -> str | int | float | bool:
    """Return a parameter's value as a scalar for the run's record. Objects become their names."""
    return value if isinstance(value, (str, int, float, bool)) else str(getattr(value, "name", None) or value)
