"""What a controller knows of its pipeline while it goes on: the steps, read from the children."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.children.child import RecordWatch, never_began, record_of
from paceline.errors import PacelineError
from paceline.job.job import Job
from paceline.pipelines.plan import output
from paceline.pipelines.spec import PipelineSpec, StepSpec, child_id
from paceline.runs import removal, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord


@dataclass
class StepState:
    """A step. status: of its run, None before it has one. is_cut_off: its run was made and never handed over."""

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


class PipelineState:
    """The pipeline's record, and its steps as they were seen last. For the holder of its lock."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.record = store.stored(folder)
        assert self.record.pipeline is not None, "its kind is pipeline"
        self.spec = PipelineSpec.from_json(self.record.pipeline)
        self.steps = [_step_of(folder, number, step) for number, step in enumerate(self.spec.steps)]

    @property
    def runs_dir(self) -> Path:
        return self.folder.path.parent

    @property
    def live(self) -> list[StepState]:
        return [step for step in self.steps if step.is_live]

    @property
    def failed(self) -> list[StepState]:
        return [step for step in self.steps if step.status in (states.FAILED, states.CANCELED)]

    def ready(self) -> list[StepState]:
        """The steps that may begin: all that they need is Completed."""
        return [
            step
            for step in self.steps
            if step.status is None and all(self.steps[other].status == states.COMPLETED for other in step.spec.after)
        ]

    def take_up(self) -> None:
        """Read the children that are there; what was being made when an earlier controller died is made again."""
        for step in self.steps:
            # A kill in the midst of a submission leaves the hidden folder, and `store.create` refuses to make one that is there.
            shutil.rmtree(self.runs_dir / f"{removal.NEW}{step.folder.run_id}", ignore_errors=True)
            if not step.folder.record.exists():
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
        """Bring the steps up to date; those whose state has changed."""
        changed = []
        for step in self.live:
            told = None if step.is_cut_off else step.watch.changed()
            if not step.is_cut_off and not step.folder.record.exists():
                # Removed by hand: nobody could ever say how it ended.
                told = {"status": states.FAILED}
            if told is None or told["status"] == step.status:
                continue
            # An engine may take a while to know that it was never given the run. A second time it is not a kill that keeps the
            # run from its start.
            if told["status"] == states.FAILED and not step.was_cut_off and not step.folder.cancel_request.exists():
                with contextlib.suppress(PacelineError):
                    if never_began(store.stored(step.folder)):
                        step.is_cut_off = step.was_cut_off = True
                        continue
            step.status = told["status"]
            changed.append(step)
        return changed

    def give_up_cut_off(self) -> None:
        """Let the steps that were never handed over be as their records say: the pipeline ends."""
        for step in self.steps:
            if step.is_cut_off:
                step.is_cut_off, step.status = False, states.FAILED

    def job_of(self, step: StepState) -> Job:
        """The step's job, with its inputs where the runs of the steps before it have left them."""
        inputs = []
        for reference in step.spec.job.inputs:
            if reference.name in step.spec.takes:
                number, name = step.spec.takes[reference.name]
                # Of a step that was reused, the former run's.
                job = store.stored(self.steps[number].folder).job
                assert job is not None, "a step that leaves something has a job"
                inputs.append(dataclasses.replace(reference, sources=output(job, name).sources))
            else:
                inputs.append(reference)
        return dataclasses.replace(step.spec.job, inputs=tuple(inputs))

    def wait_for(self, text: str | None) -> None:
        """Write down what the pipeline waits for; None for nothing."""
        if text != self.record.waiting_for:
            self.record = dataclasses.replace(self.record, waiting_for=text)
            store.write(self.folder, self.record)


def _step_of(folder: RunFolder, number: int, step: StepSpec) -> StepState:
    own = RunFolder(folder.path.parent / child_id(folder.run_id, number))
    return StepState(number=number, spec=step, folder=own, watch=RecordWatch(own))


def _is_half_made(record: RunRecord, folder: RunFolder) -> bool:
    """Whether nothing can go on with the run: one that is to take over what another has left, or a sweep without its source."""
    if record.is_terminal and record.status == states.COMPLETED:
        return False
    if record.kind == "sweep":
        return never_began(record) or (not record.is_terminal and not folder.snapshot.is_symlink())
    return bool((record.step or {}).get("reused_from"))
