"""Trials handed over to their target, as many at a time as may run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import EngineError
from paceline.runs import removal
from paceline.submit import SourceCopy, submit
from paceline.supervisor.logs import say
from paceline.sweeps.expressions import Raw
from paceline.sweeps.points import job_of
from paceline.sweeps.proposals import Proposals
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Trial
from paceline.system.files import read_json

#: After an engine has not taken a trial.
_RETRY_S = 5.0


class HandingOver:
    """Starts the trials of a sweep."""

    def __init__(self, sweep: SweepState) -> None:
        self._sweep = sweep
        self._secrets: dict[str, str] = read_json(sweep.folder.secrets) or {}
        self._proposals = Proposals(sweep.spec, sweep.folder.snapshot.resolve())
        self._not_before = 0.0

    def fill(self) -> None:
        """Start trials until as many run as may."""
        sweep = self._sweep
        while len(sweep.live) < sweep.spec.concurrent and not sweep.is_done and time.monotonic() >= self._not_before:
            number = len(sweep.trials)
            chosen = self._proposals.propose(number, sweep.trials)
            if chosen is None:
                sweep.is_exhausted = True
                say(f"the space has no further point: {number} trials in all")
                return
            try:
                self._start(number, chosen)
            except EngineError as error:
                # The engine may answer again: nothing is wrong with the sweep. What was begun of the trial has no process yet.
                begun = sweep.folder_of(number)
                if begun.record.exists():
                    removal.remove(begun)
                say(f"trial {number} could not be handed over, and will be tried again: {error}")
                self._not_before = time.monotonic() + _RETRY_S

    def _start(self, number: int, chosen: Mapping[str, Raw]) -> None:
        sweep = self._sweep
        values = sweep.spec.space.values(chosen)
        folder = submit(
            job_of(sweep.job, values),
            self._source(),
            sweep.runs_dir.parent,
            sweep.record.experiment,
            parent_run_id=sweep.folder.run_id,
            run_id=sweep.folder_of(number).run_id,
            trial={"number": number, "chosen": dict(chosen), "values": values},
            values=self._secrets,
        )
        sweep.add(Trial(number=number, run_id=folder.run_id, chosen=chosen, values=values))
        said = ", ".join(f"{name.lstrip('-')}={value}" for name, value in values.items())
        say(f"trial {number} begins: {said}")

    def _source(self) -> SourceCopy:
        record = self._sweep.record
        return SourceCopy(
            directory=Path(record.source_directory or "."), snapshot_id=record.snapshot_id, git=record.git
        )
