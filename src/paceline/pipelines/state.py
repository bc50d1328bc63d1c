"""The state of a pipeline that its controller keeps: the steps, read from the child runs."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass

from paceline.children.child import RecordWatch, is_cut_off, never_began, record_of
from paceline.children.engine import ParentState
from paceline.job.job import Job
from paceline.pipelines.plan import step_output
from paceline.pipelines.spec import PipelineSpec, StepSpec, child_id
from paceline.runs import removal, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, StepEntry


@dataclass
class StepState:
    """The state of a pipeline's step and its run.

    Attributes:
        status: Status of the run, or None before it exists.
        is_cut_off: Whether the submission of the run was interrupted and must be repeated.
        was_cut_off: Whether the submission was interrupted at least once.
    """

    number: int
    spec: StepSpec
    folder: RunFolder
    watch: RecordWatch
    status: str | None = None
    is_cut_off: bool = False
    was_cut_off: bool = False

    @property
    def is_live(self) -> bool:
        return self.status is not None and self.status not in states.TERMINAL


class PipelineState(ParentState):
    """A pipeline's record and steps, used only by the holder of its lock."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder)
        assert self.record.pipeline is not None, "its kind is pipeline"
        self.spec = PipelineSpec.from_json(self.record.pipeline)
        self.steps: list[StepState] = []
        for number, spec in enumerate(self.spec.steps):
            child = RunFolder(self.runs_dir / child_id(folder.run_id, number))
            self.steps.append(StepState(number=number, spec=spec, folder=child, watch=RecordWatch(child)))

    @property
    def live(self) -> list[StepState]:
        return [step for step in self.steps if step.is_live]

    @property
    def failed(self) -> list[StepState]:
        return [step for step in self.steps if step.status in (states.FAILED, states.CANCELED)]

    def ready(self) -> list[StepState]:
        """Return the steps that have no run and whose predecessors are Completed."""
        return [
            step
            for step in self.steps
            if step.status is None and all(self.steps[other].status == states.COMPLETED for other in step.spec.after)
        ]

    def take_up(self) -> None:
        """Read the steps' runs that exist on disk, and remove unfinished run folders."""
        for step in self.steps:
            # Delete the hidden folder that a killed submission has left, because `store.create` refuses to create it again.
            shutil.rmtree(self.runs_dir / f"{removal.NEW}{step.folder.run_id}", ignore_errors=True)
            if not step.folder.state.exists():
                continue
            if _is_half_made(store.stored(step.folder), step.folder):
                shutil.rmtree(step.folder.path, ignore_errors=True)
                continue
            if (record := record_of(step.folder)) is None:
                continue
            step.status = record.status
            if never_began(record):
                step.is_cut_off, step.was_cut_off, step.status = True, True, states.NOT_STARTED

    def look(self) -> list[StepState]:
        """Read the live steps' runs. Return the steps whose status has changed."""
        changed = []
        for step in self.live:
            if step.is_cut_off:
                continue
            state = step.watch.changed()
            status = state["status"] if state is not None else step.status
            if not step.folder.state.exists():
                # A removed run has no outputs that later steps could read, so the step counts as Failed.
                status = states.FAILED
            if status == step.status:
                continue
            # Repeat an interrupted submission only once, because it may be this submission that kills the controller.
            if status == states.FAILED and not step.was_cut_off and is_cut_off(step.folder):
                step.is_cut_off = step.was_cut_off = True
                continue
            step.status = status
            changed.append(step)
        return changed

    def give_up_cut_off(self) -> None:
        """Mark steps whose submission was interrupted as Failed."""
        for step in self.steps:
            if step.is_cut_off:
                step.is_cut_off, step.status = False, states.FAILED

    def job_of(self, step: StepState) -> Job:
        """Return the step's job with the actual locations of its inputs."""
        inputs = []
        for reference in step.spec.job.inputs:
            if reference.name in step.spec.takes:
                number, name = step.spec.takes[reference.name]
                # Read the outputs from the run's record, because a reused step has the outputs of an earlier run.
                job = store.stored(self.steps[number].folder).job
                assert job is not None, "a step that leaves something has a job"
                inputs.append(dataclasses.replace(reference, sources=step_output(job, name).sources))
            else:
                inputs.append(reference)
        return dataclasses.replace(step.spec.job, inputs=tuple(inputs))


def _is_half_made(record: RunRecord, folder: RunFolder) -> bool:
    if record.is_terminal and record.status == states.COMPLETED:
        return False
    if record.kind == "sweep":
        return never_began(record) or (not record.is_terminal and not folder.snapshot.is_symlink())
    return bool((record.step or StepEntry()).get("reused_from"))
