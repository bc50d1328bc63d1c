"""Runs of pipelines and steps (`azureml.pipeline.core.run`).

https://learn.microsoft.com/python/api/azureml-pipeline-core/azureml.pipeline.core.run.pipelinerun
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import paceline
from paceline.compat.azureml.core.run import Run, ScriptRun
from paceline.compat.azureml.exceptions import ExperimentExecutionException, UserErrorException, sdk_class
from paceline.compat.azureml.pipeline.core.graph import PortDataReference
from paceline.compat.azureml.refused import refuse
from paceline.compat.azureml.run_details import check_not_failed
from paceline.compat.azureml.train.hyperdrive.run import HyperDriveRun
from paceline.pipelines import step_output, step_records
from paceline.runs import RunRecord

if TYPE_CHECKING:
    from paceline import Workspace, runs
    from paceline.data import DataReference
    from paceline.runs import ExperimentLike

__all__ = ["PipelineRun", "StepRun", "StepRunOutput"]

#: Number that means "no time limit" in the SDK.
_FOR_EVER = 9223372036854775807
_PAUSE_S = 0.2


@sdk_class
class PipelineRun(Run, paceline.PipelineRun):
    """A submitted pipeline.

    Raises:
        UserErrorException: The run is not a pipeline.
    """

    def __init__(
        self, experiment: ExperimentLike, run_id: str, _service_endpoint: object = None, **kwargs: object
    ) -> None:
        super().__init__(experiment, run_id)

    @classmethod
    def _handle(cls, experiment: ExperimentLike, record: RunRecord) -> runs.Run:
        if record.kind == "sweep":
            return HyperDriveStepRun(experiment, record.run_id)
        return StepRun(experiment, record.run_id) if record.step is not None else Run._handle(experiment, record)

    @staticmethod
    def get(workspace: Workspace, run_id: str) -> runs.Run:
        return Run.get(workspace, run_id)

    @staticmethod
    def get_pipeline_runs(workspace: Workspace, pipeline_id: str) -> NoReturn:
        """Raise ScenarioNotSupportedException: pipelines can't be published."""
        raise refuse("get_pipeline_runs")

    def get_steps(self) -> Iterator[runs.Run]:
        """Yield the runs of the started steps, in the order of the steps."""
        for record in filter(None, step_records(self.folder, self.spec)):
            yield self._handle(self.experiment, record)

    def find_step_run(self, name: str) -> list[runs.Run]:
        """Return the runs of all started steps with this name, usually one."""
        return [step for step in self.get_steps() if (step.record().step or {}).get("name") == name]

    def get_pipeline_output(self, pipeline_output_name: str) -> PortDataReference:
        """Return the pipeline output of this name.

        Raises:
            UserErrorException: The output does not exist, or its step has not completed.
        """
        spec = self.spec
        if pipeline_output_name not in spec.outputs:
            raise UserErrorException(
                f"the pipeline has no output {pipeline_output_name!r}; it has {', '.join(spec.outputs) or 'none'}. "
                "PipelineData(pipeline_output_name=...) declares an output."
            )
        number, name = spec.outputs[pipeline_output_name]
        record = step_records(self.folder, spec)[number]
        if record is None:
            raise UserErrorException(f"step {spec.steps[number].name!r}, which writes the output, has not started.")
        found: PortDataReference = StepRun(self.experiment, record.run_id).get_output_data(name)
        return found

    def get_graph(self) -> NoReturn:
        """Raise UserErrorException: call `get_steps` instead."""
        raise UserErrorException(
            "get_graph is not supported. get_steps() returns the runs; `paceline pipeline show` prints the steps."
        )

    def publish_pipeline(self, *arguments: object, **named: object) -> NoReturn:
        """Raise ScenarioNotSupportedException: pipelines can't be published."""
        raise refuse("publish_pipeline")

    def wait_for_completion(  # type: ignore[override]  # the SDK's status in place of details
        self, show_output: bool = True, timeout_seconds: float = _FOR_EVER, raise_on_error: bool = True
    ) -> str:
        """Wait until the pipeline ends and return its status.

        Raises:
            ActivityFailedException: A step has failed and raise_on_error is true.
            ExperimentExecutionException: The timeout or Ctrl-C has ended the wait. The pipeline continues.
        """
        return _wait(self, show_output, timeout_seconds, raise_on_error)


class _Step(Run):
    """The base class of pipeline steps' runs."""

    @property
    def name(self) -> str:
        return str((self.record().step or {}).get("name") or self.id)

    @property
    def step_run_id(self) -> str:
        return self.id

    @property
    def pipeline_run_id(self) -> str | None:
        return self.record().parent_run_id

    @property
    def is_reused(self) -> bool:
        return bool((self.record().step or {}).get("reused_from"))

    @property
    def properties(self) -> dict[str, str]:
        """Return the properties, with the original run's id for a reused step."""
        origin = (self.record().step or {}).get("reused_from")
        reused = {"azureml.isreused": "true", "azureml.reusedrunid": origin} if origin else {}
        return {**super().properties, **reused}

    def get_outputs(self) -> dict[str, StepRunOutput]:
        leaves = self._that_leaves()
        job = leaves.record().job if leaves is not None else None
        return {one.name: StepRunOutput(leaves, one) for one in (job.inputs if job else ()) if one.is_output}

    def get_output(self, name: str) -> StepRunOutput:
        """Return the output of this name.

        Raises:
            UserErrorException: The step has no such output.
        """
        found = self.get_outputs()
        if name not in found:
            raise UserErrorException(f"step {self.name!r} has no output {name!r}; it has {', '.join(found) or 'none'}.")
        return found[name]

    def get_output_data(self, name: str) -> PortDataReference:
        return self.get_output(name).get_port_data_reference()

    def _that_leaves(self) -> runs.Run | None:
        """Return the run that writes the step's outputs, or None before it starts."""
        return self


@sdk_class
class StepRun(_Step, ScriptRun):
    """The run of a step."""

    def __init__(self, experiment: ExperimentLike, step_run_id: str, *others: object, **kwargs: object) -> None:
        super().__init__(experiment, step_run_id)

    @property
    def type(self) -> str:
        return "azureml.StepRun"

    def wait_for_completion(  # type: ignore[override]
        self,
        show_output: bool = True,
        timeout_seconds: float = _FOR_EVER,
        raise_on_error: bool = True,
        **others: object,
    ) -> str:
        """Wait until the step ends and return its status.

        It raises the exceptions of `PipelineRun.wait_for_completion`.
        """
        return _wait(self, show_output, timeout_seconds, raise_on_error)

    def get_job_log(self) -> str:
        """Return the run's messages and the output of its first worker."""
        return self._text_of("driver.log") + self._text_of("rank_0.log")

    def get_stdout_log(self) -> str:
        return self._text_of("rank_0.log")

    def get_stderr_log(self) -> str:
        """Return the first worker's log, which has standard output and errors."""
        return self._text_of("rank_0.log")

    def _text_of(self, name: str) -> str:
        logs = self.get_details_with_logs()["logFiles"]
        return str(logs.get(f"logs/{name}", ""))


@sdk_class
class HyperDriveStepRun(_Step, HyperDriveRun):
    """The sweep of a HyperDriveStep."""

    def __init__(
        self,
        experiment: Any = None,
        step_run_id: str = "",
        *others: object,
        step_run: runs.Run | None = None,
        **kwargs: object,
    ) -> None:
        # Accept HyperDriveStepRun(step_run=...), as in the SDK, and (experiment, id), as this package calls it.
        given = step_run if step_run is not None else experiment if not step_run_id else None
        if given is not None:
            experiment, step_run_id = given.experiment, given.id
        super().__init__(experiment, step_run_id)

    def _that_leaves(self) -> runs.Run | None:
        pipeline = PipelineRun(self.experiment, self.pipeline_run_id or "")
        return next(iter(pipeline.find_step_run(f"{self.name} outputs")), None)


class StepRunOutput:
    """An output of a step's run, with its place in a datastore."""

    def __init__(self, step_run: Any, reference: DataReference) -> None:
        self._step, self._reference = step_run, reference

    @property
    def name(self) -> str:
        return str(self._reference.name)

    def get_port_data_reference(self) -> PortDataReference:
        job = self._step.record().job
        assert job is not None, "a step has a job"
        return PortDataReference(
            self._step._workspace(), self._step.pipeline_run_id or "", step_output(job, self._reference.name)
        )


def _wait(run: Run, show_output: bool, timeout_seconds: float, raise_on_error: bool) -> str:
    if show_output:
        print(f"{type(run).__name__}Id: {run.id}\nLink to folder: {run.get_portal_url()}", flush=True)
    try:
        if timeout_seconds < _FOR_EVER:
            _within(run, timeout_seconds)
        record = super(Run, run).wait_for_completion(show_output, raise_on_error=False)
    except KeyboardInterrupt:
        raise ExperimentExecutionException(
            f"The wait was interrupted; {run.id} goes on. paceline cancel {run.id} ends it."
        ) from None
    if raise_on_error:
        check_not_failed(record)
    return str(record.status)


def _within(run: Run, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not run.record().is_terminal:
        if time.monotonic() > deadline:
            raise ExperimentExecutionException(f"{run.id} has not ended within {seconds:g} s. It goes on.")
        time.sleep(_PAUSE_S)
