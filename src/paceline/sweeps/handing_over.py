"""Trials handed over to their target, as many at a time as may run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import EngineError
from paceline.runs import removal
from paceline.runs.folder import RunFolder
from paceline.submit import SourceCopy, submit
from paceline.supervisor.logs import say
from paceline.sweeps import continuing
from paceline.sweeps.expressions import Raw
from paceline.sweeps.live.table import number as short
from paceline.sweeps.points import job_of
from paceline.sweeps.proposals import Proposals
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Next, Trial
from paceline.system.files import read_json

#: After an engine has not taken a trial: the first pause. Each further one is twice as long, up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
#: So long an engine may take nothing while nothing of the sweep runs.
_PATIENCE_S = 3600.0


class HandingOver:
    """Starts the trials of a sweep. clock: seconds, which only grow."""

    def __init__(self, sweep: SweepState, clock: Callable[[], float] = time.monotonic) -> None:
        self._sweep = sweep
        self._clock = clock
        self._secrets: dict[str, str] = read_json(sweep.folder.secrets) or {}
        self._snapshot = sweep.folder.snapshot.resolve()
        self._proposals = Proposals(sweep.spec, self._snapshot)
        self._pause = 0.0
        self._not_before = self._clock()
        self._refused_since: float | None = None

    def fill(self) -> None:
        """Start trials until as many run as may: those that their policy goes on with, then new ones.

        Raises:
            PacelineError: a trial can't be submitted, or the engine has not taken any for an hour.
        """
        sweep = self._sweep
        while len(sweep.live) < sweep.spec.concurrent and self._clock() >= self._not_before:
            following = continuing.following(sweep)
            if following is not None:
                self._hand_over(following.number, following.chosen, following)
                continue
            if sweep.is_done:
                self._taken()
                return
            number = len(sweep.trials)
            # A point that the engine has not taken is kept: a sampler that is asked once more proposes another one.
            chosen = sweep.pending = sweep.pending or self._proposals.propose(number, sweep.trials)
            if chosen is None:
                sweep.is_exhausted = True
                say(f"the space has no further point: {number} trials in all")
            else:
                self._hand_over(number, chosen, None)

    @property
    def is_waiting(self) -> bool:
        """Whether a trial is to be handed over that the engine does not take yet."""
        return self._refused_since is not None

    def _hand_over(self, number: int, chosen: Mapping[str, Raw], following: Next | None) -> None:
        sweep = self._sweep
        try:
            self._start(number, chosen, following)
        except EngineError as error:
            # The engine may answer again: nothing is wrong with the sweep. What was begun of the trial has no process yet.
            begun = sweep.next_folder(number)
            if begun.record.exists():
                removal.remove(begun)
            self._refused(number, error)
        else:
            self._taken()
            if following is None:
                sweep.pending = None

    def _taken(self) -> None:
        self._pause, self._refused_since = 0.0, None
        self._sweep.wait_for(None)

    def _refused(self, number: int, error: EngineError) -> None:
        now = self._clock()
        # While others run, the end of one may make the room that is missing.
        if self._refused_since is None or self._sweep.live:
            self._refused_since = now
        if (waited := now - self._refused_since) >= _PATIENCE_S:
            raise EngineError(
                f"compute target {self._sweep.record.target!r} has taken no trial for {waited / 60:.0f} minutes: {error} "
                f"Once it does again: paceline sweep more {self._sweep.folder.run_id} --trials N"
            ) from error
        self._pause = min(2 * self._pause or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._not_before = now + self._pause
        say(f"trial {number} could not be handed over, and will be tried again in {self._pause:g} s: {error}")
        self._sweep.wait_for(
            f"compute target {self._sweep.record.target!r}, which does not take trial {number}: {error}"
        )

    def _start(self, number: int, chosen: Mapping[str, Raw], following: Next | None) -> None:
        """following: what a trial that is there goes on with; None for a new one."""
        sweep = self._sweep
        values = sweep.spec.space.values(chosen)
        told: dict[str, Any] = {"number": number, "chosen": dict(chosen), "values": values}
        checkpoints = None
        if following is not None:
            told |= {"from": following.source, "rung": following.rung, "why": following.why}
            checkpoints = RunFolder(sweep.runs_dir / following.source).checkpoints
        folder = submit(
            job_of(
                sweep.job,
                values | continuing.budget(sweep, 0 if following is None else following.rung),
                sweep.spec.pass_as,
                self._snapshot,
            ),
            self._source(),
            sweep.runs_dir.parent,
            sweep.record.experiment,
            parent_run_id=sweep.folder.run_id,
            run_id=sweep.next_folder(number).run_id,
            trial=told,
            values=self._secrets,
            checkpoints=checkpoints,
        )
        if following is not None:
            sweep.go_on(sweep.trials[number].gone_on(folder.run_id, following, values))
            say(f"trial {number} goes on as {folder.run_id}: {following.why}")
            return
        sweep.add(Trial(number=number, run_id=folder.run_id, chosen=chosen, values=values))
        said = ", ".join(f"{name.lstrip('-')}={short(value)}" for name, value in values.items())
        say(f"trial {number} begins: {said}")

    def _source(self) -> SourceCopy:
        record = self._sweep.record
        return SourceCopy(
            directory=Path(record.source_directory or "."), snapshot_id=record.snapshot_id, git=record.git
        )
