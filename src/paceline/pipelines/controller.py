"""A pipeline's own supervisor: starts each step when all that it needs is there, and says how it all ended.

All that it has to know lies in the pipeline's record and its children's. So another one, started in its place, goes on where it
was: a step that has a run is not started again.
"""

from __future__ import annotations

import time

from paceline.controlling.canceling import Canceling
from paceline.pipelines import ending, reuse
from paceline.pipelines.handing_over import HandingOverSteps
from paceline.pipelines.state import PipelineState, StepState
from paceline.runs import states, store
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now

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
            if end := ending.wanted(pipeline):
                self._end_all(end)
                if not pipeline.live:
                    break
            else:
                self._handing_over.fill()
                if not pipeline.live and not pipeline.ready():
                    break
            time.sleep(_LOOK_S)
        ending.write(pipeline)

    def _end_all(self, reason: str) -> None:
        self.pipeline.give_up_cut_off()
        for step in self.pipeline.live:
            if self._canceling.ask(step.folder, reason):
                say(f"step {step.spec.name} is ended: {reason}")

    def _note(self, step: StepState) -> None:
        """Let later pipelines find what the step has left."""
        if step.status == states.COMPLETED:
            reuse.note(store.stored(step.folder), self.pipeline.runs_dir.parent)
