"""A pipeline's own supervisor: starts each step when all that it needs is there, and says how it all ended.

All that it has to know lies in the pipeline's record and its children's. So another one, started in its place, goes on where it
was: a step that has a run is not started again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.children import engine, retries
from paceline.children.child import record_of
from paceline.children.retries import Canceling, Refusals
from paceline.errors import EngineError, PacelineError, PipelineError
from paceline.job.job import Job
from paceline.pipelines import reuse
from paceline.pipelines.spec import PipelineSpec, child_id
from paceline.pipelines.state import PipelineState, StepState
from paceline.runs import removal, states, store, tags_and_properties
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now
from paceline.submit import SourceCopy, places_of, submit, submit_again
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import submit_sweep
from paceline.system.files import read_json

#: Between two looks at the steps that run.
_LOOK_S = 0.05


class PipelineController:
    """Sees one pipeline through. For the holder of its lock."""

    def __init__(self, folder: RunFolder) -> None:
        self.pipeline = PipelineState(folder)
        self._handing_over = HandingOverSteps(self.pipeline)
        self._canceling = Canceling(f"pipeline {folder.run_id}")

    def run(self, record: RunRecord) -> None:
        """To the pipeline's end, which is written down; or until its folder is gone. record: as it is now."""
        pipeline = self.pipeline
        pipeline.record = record
        pipeline.take_up()
        if begun := [step for step in pipeline.steps if step.status is not None]:
            say(f"going on with {len(begun)} of {len(pipeline.steps)} steps, of which {len(pipeline.live)} run")
        for step in begun:
            self._note(step)
        if record.status != states.RUNNING:
            started = record.started_utc or utc_now()
            pipeline.record = store.change(pipeline.folder, record, states.RUNNING, started_utc=started)
        while True:
            if not pipeline.folder.record.exists():
                # Removed by hand: nobody could ask for the end of what runs any more, and it can't be written down.
                self._end_all("the pipeline's folder is gone")
                return
            for step in pipeline.look():
                if not step.is_live:
                    say(f"step {step.spec.name} is {step.status}")
                    self._note(step)
            self._canceling.again()
            if end := wanted(pipeline):
                self._end_all(end)
                if not pipeline.live:
                    break
            else:
                self._handing_over.fill()
                if not pipeline.live and not pipeline.ready():
                    break
            time.sleep(_LOOK_S)
        write(pipeline)

    def _end_all(self, reason: str) -> None:
        self.pipeline.give_up_cut_off()
        for step in self.pipeline.live:
            if self._canceling.ask(step.folder, reason):
                say(f"step {step.spec.name} is ended: {reason}")

    def _note(self, step: StepState) -> None:
        """Let later pipelines find what the step has left."""
        if step.status == states.COMPLETED:
            reuse.note(store.stored(step.folder), self.pipeline.runs_dir.parent)


def wanted(pipeline: PipelineState) -> str | None:
    """Why the pipeline is to end before its time; None while it goes on."""
    if pipeline.folder.cancel_request.exists():
        return "the pipeline is canceled"
    if pipeline.failed and not pipeline.spec.continue_on_step_failure:
        # Of several that ended in one look, the one that was not told to.
        first = _first(pipeline)
        return f"step {first.spec.name!r} {'has failed' if first.status == states.FAILED else 'was canceled'}"
    return None


def write(pipeline: PipelineState) -> None:
    """Write down the end of a pipeline none of whose steps runs any more."""
    pipeline.record = engine.close(pipeline.folder, pipeline.record, _report(pipeline) if pipeline.failed else None)


def give_up(folder: RunFolder, error: Exception) -> None:
    """End a pipeline whose controller can't go on: its steps are ended, and it has Failed. For the holder of its lock."""
    count = len(PipelineSpec.from_json(store.stored(folder).pipeline or {}).steps)

    def living() -> Iterator[RunFolder]:
        for number in range(count):
            step = RunFolder(folder.path.parent / child_id(folder.run_id, number))
            if (record := record_of(step)) is not None and not record.is_terminal:
                yield step

    retries.give_up(folder, error, "step", living)


def _first(pipeline: PipelineState) -> StepState:
    """The step that the others were ended for."""

    def key(step: StepState) -> tuple[bool, str]:
        try:
            record = store.stored(step.folder)
        except PacelineError:
            return True, ""
        return step.status != states.FAILED, record.ended_utc or ""

    return min(pipeline.failed, key=key)


def _report(pipeline: PipelineState) -> FailureReport:
    first = _first(pipeline)
    name, run_id = first.spec.name, first.folder.run_id
    try:
        record = store.stored(first.folder)
    except PacelineError:
        return FailureReport(cause="step", message=f"step {name!r} is gone: its run {run_id} was removed.")
    if record.failure is None:
        by = f" by {record.canceled_by}" if record.canceled_by else ""
        return FailureReport(cause="step", message=f"step {name!r} ({run_id}) was canceled{by}.")
    others = [step.spec.name for step in pipeline.steps if step.status is None]
    never = f" Not begun: {', '.join(others)}." if others else ""
    why = record.failure.exception or record.failure.message
    return FailureReport(
        cause="step",
        message=f"step {name!r} ({run_id}) failed: {why.strip()}{never}",
        exit_code=record.exit_code or 1,
        traceback=record.failure.traceback,
        last_lines=record.failure.last_lines,
        see=f"paceline show {run_id}",
    )


class HandingOverSteps:
    """Starts the steps of a pipeline."""

    def __init__(self, pipeline: PipelineState) -> None:
        self._pipeline = pipeline
        self._workspace_dir = pipeline.runs_dir.parent
        self._secrets: dict[str, str] = read_json(pipeline.folder.secrets) or {}
        self._refusals = {name: Refusals(name) for name in {step.spec.job.compute_target for step in pipeline.steps}}

    def fill(self) -> None:
        """Start all steps that may begin.

        Raises:
            PacelineError: a step can't be submitted, or its engine has taken nothing for an hour.
        """
        for step in [*(one for one in self._pipeline.steps if one.is_cut_off), *self._pipeline.ready()]:
            refusals = self._refusals[step.spec.job.compute_target]
            if not refusals.may_ask:
                continue
            try:
                self._again(step) if step.is_cut_off else self._begin(step)
            except EngineError as error:
                # The engine may answer again: nothing is wrong with the pipeline. What was begun has no process yet.
                if step.folder.record.exists():
                    removal.remove(step.folder)
                step.status, step.is_cut_off = None, False
                self._refused(step, refusals, error)
            except PacelineError as error:
                raise PipelineError(f"step {step.spec.name!r} can't be started: {error}") from error
            else:
                refusals.taken()
                if not any(one.is_waiting for one in self._refusals.values()):
                    self._pipeline.wait_for(None)

    def _refused(self, step: StepState, refusals: Refusals, error: EngineError) -> None:
        target, name = step.spec.job.compute_target, step.spec.name
        pause = refusals.refused("step", error, others_run=bool(self._pipeline.live))
        say(f"step {name} could not be handed over, and will be tried again in {pause:g} s: {error}")
        self._pipeline.wait_for(f"compute target {target!r}, which does not take step {name!r}: {error}")

    def _again(self, step: StepState) -> None:
        """Hand over a step whose submission was cut off."""
        job = store.stored(step.folder).job
        assert job is not None, "it was submitted"
        submit_again(step.folder, self._values(job))
        step.is_cut_off = False
        say(f"step {step.spec.name} begins: its submission was cut off before")

    def _begin(self, step: StepState) -> None:
        pipeline, spec = self._pipeline, step.spec
        job, told = pipeline.job_of(step), {"number": step.number, "name": spec.name}
        if spec.sweep is None and spec.allow_reuse and self._is_reused(step, job, told):
            return
        source = SourceCopy(directory=Path(spec.source_directory), snapshot_id=spec.snapshot_id, git=spec.git)
        given: dict[str, Any] = {
            "workspace_dir": self._workspace_dir,
            "experiment": pipeline.record.experiment,
            "parent_run_id": pipeline.folder.run_id,
            "run_id": step.folder.run_id,
            "step": told,
            "display_name": spec.name,
            "values": self._values(job),
            "warnings": spec.warnings,
        }
        if spec.sweep is not None:
            submit_sweep(job, SweepSpec.from_json(spec.sweep), source, **given)
        else:
            submit(job, source, **given)
        step.status = states.NOT_STARTED
        say(f"step {spec.name} begins: {step.folder.run_id}")

    def _is_reused(self, step: StepState, job: Job, told: dict[str, Any]) -> bool:
        """Whether a former run's outputs are taken. What the step is known by is noted in `told`."""
        try:
            told["key"] = reuse.key_of(step.spec, job, self._workspace_dir)
        except PacelineError as error:
            say(f"step {step.spec.name}: it can't be told whether its inputs have changed, so it runs: {error}")
            return False
        if self._pipeline.spec.regenerate_outputs:
            return False
        former = reuse.find(told["key"], self._workspace_dir, self._pipeline.folder.run_id)
        if former is None:
            return False
        reuse.take_over(former, step.spec, step.folder.run_id, told, self._pipeline.record, self._pipeline.runs_dir)
        # A kill in between loses no more than the name.
        with contextlib.suppress(OSError):
            tags_and_properties.set_name(step.folder.notes, "display_name", step.spec.name)
        step.status = states.COMPLETED
        say(f"step {step.spec.name} is reused: nothing has changed since {former.run_id}")
        return True

    def _values(self, job: Job) -> dict[str, str]:
        return {name: self._secrets[place] for name, place in places_of(job).items()}
