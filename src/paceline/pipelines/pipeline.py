"""What the user writes for a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.stores.record import default_name
from paceline.errors import PipelineError
from paceline.pipelines.data import PipelineData, check_parameters, defaults
from paceline.pipelines.graph import flat, ordered
from paceline.pipelines.plan import spec_of
from paceline.pipelines.spec import PipelineSpec
from paceline.pipelines.start import submit_pipeline
from paceline.pipelines.step import Step
from paceline.runs.ids import check_run_id, new_run_id

if TYPE_CHECKING:
    from paceline.runs.folder import RunFolder
    from paceline.snapshot import Progress


class Pipeline:
    """Steps that run in the order of their data; `Experiment.submit` starts it, and it goes on when the program has ended.

    steps: `Step`s, or lists of them. Steps whose data they take belong to it without being named. Those that do not need each
        other run at once.
    outputs: name -> `PipelineData` that the pipeline gives under this name.
    continue_on_step_failure: where a step fails, go on with those that do not need it; else all that runs is ended.

    Args:
        description: Text for people.

    Raises:
        PipelineError: steps of one name, a circle, data that no step leaves; the message names them.
    """

    def __init__(
        self,
        steps: Step | Sequence[Step | Sequence[Step]],
        *,
        outputs: Mapping[str, PipelineData] | None = None,
        continue_on_step_failure: bool = False,
        description: str | None = None,
    ) -> None:
        given = flat(steps if isinstance(steps, (list, tuple)) else [steps])
        for step in given:
            if not isinstance(step, Step):
                raise PipelineError(f"{step!r} is no step. Make one: paceline.Step(name, estimator).")
        self.steps: list[Step] = ordered(given, Step.needs, lambda step: step.name)
        names = [step.name for step in self.steps]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PipelineError(f"two steps are called {twice[0]!r}. Give each a name of its own.")
        self.outputs = dict(outputs or {})
        self.continue_on_step_failure = continue_on_step_failure
        self.description = description
        # Only for its checks: a mistake is told where the user wrote it, before anything is submitted.
        self.spec("check_0_00000000", "default", self.parameters)

    def __repr__(self) -> str:
        return f"Pipeline({self.steps!r})"

    @property
    def parameters(self) -> dict[str, Any]:
        """Name -> default of each `PipelineParameter` that stands in a step."""
        return defaults(parameter for step in self.steps for parameter in step.parameters().items())

    def spec(
        self, run_id: str, default_store: str, parameters: Mapping[str, Any], *, regenerate_outputs: bool = False
    ) -> tuple[PipelineSpec, list[Path]]:
        """The pipeline as its record will hold it, and the source directory of each step."""
        return spec_of(
            self.steps,
            lambda step, child: step.planned(child, default_store, parameters),
            lambda step: step.after,
            run_id,
            self.outputs,
            parameters=dict(parameters),
            continue_on_step_failure=self.continue_on_step_failure,
            regenerate_outputs=regenerate_outputs,
            description=self.description,
        )

    def submit(
        self,
        workspace_dir: Path,
        experiment: str,
        *,
        pipeline_parameters: Mapping[str, Any] | None = None,
        parameters_told: Mapping[str, Any] | None = None,
        regenerate_outputs: bool = False,
        tags: Mapping[str, object] | None = None,
        progress: Progress | None = None,
        display_name: str | None = None,
        run_id: str | None = None,
        values: Mapping[str, str] | None = None,
        leave_out: Sequence[Path] = (),
    ) -> RunFolder:
        """Start it. `Experiment.submit` calls this.

        parameters_told: what its record says beside, of values that stand in the steps already.
        """
        run_id = new_run_id(experiment) if run_id is None else check_run_id(run_id)
        parameters = check_parameters(self.parameters, dict(pipeline_parameters or {}))
        parameters |= parameters_told or {}
        spec, directories = self.spec(
            run_id, default_name(workspace_dir), parameters, regenerate_outputs=regenerate_outputs
        )
        return submit_pipeline(
            spec,
            directories,
            workspace_dir,
            experiment,
            run_id=run_id,
            tags=tags,
            progress=progress,
            display_name=display_name,
            values=values,
            leave_out=leave_out,
        )
