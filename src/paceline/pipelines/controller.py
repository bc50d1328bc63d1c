"""The controller of a pipeline, which starts each step when its inputs exist, and ends the pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from paceline.children.child import record_of
from paceline.children.engine import ParentController, counts_text
from paceline.children.retries import Refusals
from paceline.errors import EngineError, PacelineError, PipelineError
from paceline.job.job import Job
from paceline.pipelines import reuse
from paceline.pipelines.spec import PipelineSpec, child_id
from paceline.pipelines.state import PipelineState, StepState
from paceline.runs import states, store, tags_and_properties
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import StepEntry
from paceline.submit import SourceCopy, places_of, submit, submit_again
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import submit_sweep
from paceline.system.files import read_json


class PipelineController(ParentController[PipelineState]):
    """An object that starts a pipeline's steps when their inputs exist."""

    CAUSE = "step"

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder)
        self._dispatcher = _Dispatcher(self.state)

    @staticmethod
    def read_state(folder: RunFolder) -> PipelineState:
        return PipelineState(folder)

    def take_up(self) -> None:
        pipeline = self.state
        pipeline.take_up()
        if begun := [step for step in pipeline.steps if step.status is not None]:
            say(f"going on with {len(begun)} of {len(pipeline.steps)} steps, of which {len(pipeline.live)} run")
        for step in begun:
            self._offer_for_reuse(step)

    def look(self) -> None:
        for step in self.state.look():
            if not step.is_live:
                say(f"step {step.spec.name} is {step.status}")
                self._offer_for_reuse(step)

    def end_reason(self) -> str | None:
        pipeline = self.state
        if pipeline.folder.cancel_request.exists():
            return "the pipeline is canceled"
        if pipeline.failed and not pipeline.spec.continue_on_step_failure:
            first = _first_failed(pipeline)
            return f"step {first.spec.name!r} {'has failed' if first.status == states.FAILED else 'was canceled'}"
        return None

    def advance(self) -> None:
        self._dispatcher.fill()

    def is_done(self) -> bool:
        return not self.state.ready()

    def stop_all(self, reason: str) -> None:
        self.state.give_up_cut_off()
        for step in self.state.live:
            if self.canceling.ask(step.folder, reason):
                say(f"step {step.spec.name} is ended: {reason}")

    def write_end(self) -> None:
        pipeline = self.state
        report = _failure_report(pipeline) if pipeline.failed else None
        digest = counts_text("step", (step.status or "not begun" for step in pipeline.steps))
        pipeline.close(report, digest)

    @staticmethod
    def living(folder: RunFolder) -> Iterator[RunFolder]:
        for number in range(len(PipelineSpec.from_json(store.stored(folder).pipeline or {}).steps)):
            step = RunFolder(folder.path.parent / child_id(folder.run_id, number))
            if (record := record_of(step)) is not None and not record.is_terminal:
                yield step

    def _offer_for_reuse(self, step: StepState) -> None:
        if step.status == states.COMPLETED:
            reuse.note(store.stored(step.folder), self.state.runs_dir.parent)


class _Dispatcher:
    def __init__(self, pipeline: PipelineState) -> None:
        self._pipeline = pipeline
        self._workspace_dir = pipeline.runs_dir.parent
        self._secrets: dict[str, str] = read_json(pipeline.folder.secrets) or {}
        self._refusals = {name: Refusals(name) for name in {step.spec.job.compute_target for step in pipeline.steps}}

    def fill(self) -> None:
        """Start all steps whose predecessors are Completed.

        Raises:
            PacelineError: A step cannot be submitted, or the target's engine, such as Slurm, has refused all steps for an hour.
        """
        for step in [*(step for step in self._pipeline.steps if step.is_cut_off), *self._pipeline.ready()]:
            refusals = self._refusals[step.spec.job.compute_target]
            if not refusals.may_ask:
                continue
            self._pipeline.check()
            try:
                self._again(step) if step.is_cut_off else self._begin(step)
            except EngineError as error:
                # Reset the step, so that the controller submits it again later, when the engine may have recovered.
                step.status, step.is_cut_off = None, False
                self._pipeline.refused(f"step {step.spec.name}", [step.folder], refusals, error)
            except PacelineError as error:
                raise PipelineError(f"step {step.spec.name!r} can't be started: {error}") from error
            else:
                refusals.taken()
                if not any(other.is_waiting for other in self._refusals.values()):
                    self._pipeline.wait_for(None)

    def _again(self, step: StepState) -> None:
        job = store.stored(step.folder).job
        assert job is not None, "it was submitted"
        submit_again(step.folder, self._values(job))
        step.is_cut_off = False
        say(f"step {step.spec.name} begins: its submission was cut off before")

    def _begin(self, step: StepState) -> None:
        pipeline, spec = self._pipeline, step.spec
        # Remove `notify` from the step's job: its receivers get messages about the pipeline, but not about each step.
        job = dataclasses.replace(pipeline.job_of(step), notify=())
        entry: StepEntry = {"number": step.number, "name": spec.name}
        if spec.sweep is None and spec.allow_reuse and self._is_reused(step, job, entry):
            return
        source = SourceCopy(directory=Path(spec.source_directory), snapshot_id=spec.snapshot_id, git=spec.git)
        start = submit if spec.sweep is None else functools.partial(submit_sweep, spec=SweepSpec.from_json(spec.sweep))
        start(
            job,
            source=source,
            workspace_dir=self._workspace_dir,
            experiment=pipeline.record.experiment,
            parent_run_id=pipeline.folder.run_id,
            run_id=step.folder.run_id,
            step=entry,
            display_name=spec.name,
            values=self._values(job),
            warnings=spec.warnings,
        )
        step.status = states.NOT_STARTED
        say(f"step {spec.name} begins: {step.folder.run_id}")

    def _is_reused(self, step: StepState, job: Job, entry: StepEntry) -> bool:
        """Reuse a former run's outputs for a step, and return True, if possible."""
        try:
            entry["key"] = reuse.key_of(step.spec, job, self._workspace_dir)
        except PacelineError as error:
            say(f"step {step.spec.name}: it can't be told whether its inputs have changed, so it runs: {error}")
            return False
        if self._pipeline.spec.regenerate_outputs:
            return False
        former = reuse.find(entry["key"], self._workspace_dir, self._pipeline.folder.run_id)
        if former is None:
            return False
        reuse.take_over(former, step.spec, step.folder.run_id, entry, self._pipeline.record, self._pipeline.runs_dir)
        # Ignore an error such as a full disk: it only means that the run gets no display name.
        with contextlib.suppress(OSError):
            tags_and_properties.set_name(step.folder.notes, "display_name", step.spec.name)
        step.status = states.COMPLETED
        say(f"step {step.spec.name} is reused: nothing has changed since {former.run_id}")
        return True

    def _values(self, job: Job) -> dict[str, str]:
        return {name: self._secrets[place] for name, place in places_of(job).items()}


def _first_failed(pipeline: PipelineState) -> StepState:
    def key(step: StepState) -> tuple[bool, str]:
        try:
            record = store.stored(step.folder)
        except PacelineError:
            return True, ""
        return step.status != states.FAILED, record.ended_utc or ""

    return min(pipeline.failed, key=key)


def _failure_report(pipeline: PipelineState) -> FailureReport:
    first = _first_failed(pipeline)
    name, run_id = first.spec.name, first.folder.run_id
    try:
        record = store.stored(first.folder)
    except PacelineError:
        return FailureReport(cause="step", message=f"step {name!r} is gone: its run {run_id} was removed.")
    if record.failure is None:
        by = f" by {record.canceled_by}" if record.canceled_by else ""
        return FailureReport(cause="step", message=f"step {name!r} ({run_id}) was canceled{by}.")
    others = [step.spec.name for step in pipeline.steps if step.status is None]
    not_begun = f" Not begun: {', '.join(others)}." if others else ""
    why = record.failure.exception or record.failure.message
    return FailureReport(
        cause="step",
        message=f"step {name!r} ({run_id}) failed: {why.strip()}{not_begun}",
        exit_code=record.exit_code or 1,
        traceback=record.failure.traceback,
        last_lines=record.failure.last_lines,
        see=f"paceline show {run_id}",
    )
