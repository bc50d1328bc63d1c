"""Steps handed over to their targets, as soon as all that they need is there."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from paceline.controlling.refusals import Refusals
from paceline.errors import EngineError, PacelineError, PipelineError
from paceline.job.job import Job
from paceline.pipelines import reuse
from paceline.pipelines.state import PipelineState, StepState
from paceline.runs import removal, states, store, tags_and_properties
from paceline.runs.driver_log import say
from paceline.submit import SourceCopy, places_of, submit, submit_again
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import submit_sweep
from paceline.system.files import read_json


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
