"""The handle on a submitted pipeline."""

from __future__ import annotations

import sys
from typing import Any, TypedDict

from paceline.children import child
from paceline.children.child import record_of
from paceline.errors import PipelineError
from paceline.job.data_reference import DataReference
from paceline.job.job import Job
from paceline.pipelines.plan import step_output
from paceline.pipelines.spec import PipelineSpec, child_id
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, StepEntry
from paceline.runs.run import ExperimentLike, Run
from paceline.runs.visible import visible_line

#: Statuses of a step without a run. WAITING: the step may begin later. SKIPPED: a predecessor failed, so it will never begin.
WAITING, SKIPPED = "NotStarted", "Skipped"


class StepRow(TypedDict):
    """A row in a table of a pipeline's steps; `rows` describes its keys."""

    number: int
    step: str
    run_id: str | None
    status: str
    after: list[str]
    reused_from: str | None
    target: str | None
    started_utc: str | None
    duration_s: float | None
    failure: str | None


class PipelineRun(Run):
    """A pipeline's run, whose children are the steps.

    Raises:
        PipelineError: The run is no pipeline.

    Examples:
        >>> pipeline = pl.Pipeline(pl.Step("train", pl.Estimator(entry_script="train.py")))
        >>> run = pl.Experiment(pl.Workspace("my_runs"), "digits").submit(pipeline)
        >>> status = run.wait_for_completion().status
        >>> run.steps["train"].status
        'Completed'
    """

    def __init__(self, experiment: ExperimentLike, run_id: str) -> None:
        super().__init__(experiment, run_id)
        if self.record().pipeline is None:
            raise PipelineError(f"run {self.id} is not a pipeline; its kind is {self.record().kind}.")

    @classmethod
    def _handle(cls, experiment: ExperimentLike, record: RunRecord) -> Any:
        return Run._handle(experiment, record)

    def wait_for_completion(self, show_output: bool = False, raise_on_error: bool = True) -> RunRecord:
        """Wait until the pipeline has ended and return its record.

        Ctrl-C stops the waiting, not the pipeline.

        Args:
            show_output: Print the controller's log as it grows.
            raise_on_error: Raise if a step has failed.

        Raises:
            RunFailedError: A step has failed, unless raise_on_error=False.
        """
        if show_output:
            try:
                child.follow_log(self._folder, lambda line: print(visible_line(line), flush=True))
            except KeyboardInterrupt:
                print(f"\nPipeline {self.id} goes on. Cancel it with: paceline cancel {self.id}", file=sys.stderr)
                raise
        return super().wait_for_completion(raise_on_error=raise_on_error)

    @property
    def spec(self) -> PipelineSpec:
        """The pipeline's steps and options, as submitted."""
        return PipelineSpec.from_json(self.record().pipeline or {})

    @property
    def steps(self) -> dict[str, Run]:
        """The runs of the steps that have begun, in order, by step name."""
        spec = self.spec
        pairs = zip(spec.steps, step_records(self._folder, spec), strict=True)
        return {step.name: self._handle(self._experiment, record) for step, record in pairs if record is not None}

    def step_rows(self) -> list[StepRow]:
        """Return a table row for each step, as a mapping."""
        return rows(self._folder, self.record())

    def output(self, name: str, step: str | None = None) -> DataReference:
        """Return a step's output as an input for other runs.

        Args:
            name: Name of the output.
            step: Name of the step. None: an output of the pipeline, or of the only step that has it.

        Raises:
            PipelineError: There is no such output, several steps have it, or its step is not Completed.
        """
        spec = self.spec
        if step is None and name in spec.outputs:
            number, own = spec.outputs[name]
        else:
            places = [
                (n, name)
                for n, step_spec in enumerate(spec.steps)
                if step in (None, step_spec.name) and name in _left_by(step_spec.job)
            ]
            if len(places) != 1:
                there = sorted(
                    {f"{step_spec.name}: {left}" for step_spec in spec.steps for left in _left_by(step_spec.job)}
                )
                raise PipelineError(
                    f"{len(places) or 'no'} outputs of pipeline {self.id} are {name!r}{f' of step {step!r}' if step else ''}. "
                    f"There are {', '.join(there) or 'none'}."
                )
            number, own = places[0]
        record = step_records(self._folder, spec)[number]
        if record is None or record.status != "Completed" or record.job is None:
            raise PipelineError(f"step {spec.steps[number].name!r}, which leaves {own!r}, is not Completed.")
        return DataReference(name=own, sources=step_output(record.job, own).sources)


def _left_by(job: Job) -> list[str]:
    return [reference.name for reference in job.inputs if reference.is_output]


def step_records(folder: RunFolder, spec: PipelineSpec) -> list[RunRecord | None]:
    """Return each step's record; None for a step that has not begun."""
    return [record_of(RunFolder(folder.path.parent / child_id(folder.run_id, n))) for n in range(len(spec.steps))]


def rows(folder: RunFolder, pipeline: RunRecord) -> list[StepRow]:
    """Return a table row for each step of a pipeline.

    Keys: number, step (its name), run_id, status, after (names), reused_from, target, started_utc, duration_s, failure (its
    message). run_id is None before the step begins. A step that will never begin is Skipped.
    """
    spec = PipelineSpec.from_json(pipeline.pipeline or {})
    step_rows: list[StepRow] = []
    for number, (step, record) in enumerate(zip(spec.steps, step_records(folder, spec), strict=True)):
        row: StepRow = {
            "number": number,
            "step": step.name,
            "run_id": None,
            "status": SKIPPED if pipeline.is_terminal else WAITING,
            "after": [spec.steps[other].name for other in step.after],
            "reused_from": None,
            "target": step.job.compute_target,
            "started_utc": None,
            "duration_s": None,
            "failure": None,
        }
        if record is not None:
            row["run_id"], row["status"] = record.run_id, record.status
            row["reused_from"] = (record.step or StepEntry()).get("reused_from")
            row["started_utc"], row["duration_s"] = record.started_utc, record.duration_s
            row["failure"] = record.failure.message if record.failure else None
        step_rows.append(row)
    return step_rows
