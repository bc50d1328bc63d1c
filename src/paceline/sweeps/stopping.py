"""Trials that are stopped: by the sweep's policy, and all of them at its end."""

from __future__ import annotations

import time

from paceline.errors import PacelineError
from paceline.runs import read, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.supervisor.logs import say
from paceline.sweeps.sweep_state import SweepState

#: After the engine of a trial that is to end has not answered.
_AGAIN_S = 5.0


class Canceling:
    """Asks for the end of trials: of each once, and again where nobody could be told. sweep_id: who asks."""

    def __init__(self, sweep_id: str) -> None:
        self._by = f"sweep {sweep_id}"
        self._asked: set[str] = set()
        self._untold: dict[str, tuple[RunFolder, str]] = {}
        self._again_at = 0.0

    def ask(self, trial: RunFolder, reason: str) -> bool:
        """Whether it is asked for only now."""
        if trial.run_id in self._asked:
            return False
        self._asked.add(trial.run_id)
        # Who canceled the trial by hand keeps that as its reason.
        if not trial.cancel_request.exists():
            self._tell(trial, reason)
        return True

    def again(self) -> None:
        """Ask once more for what nobody could be told; to be called now and then."""
        if self._untold and time.monotonic() >= self._again_at:
            for trial, reason in list(self._untold.values()):
                self._tell(trial, reason)

    def _tell(self, trial: RunFolder, reason: str) -> None:
        self._untold.pop(trial.run_id, None)
        try:
            # The tag goes first, so that whoever sees the trial end can read why.
            tags_and_properties.set_tags(trial.notes, {"stopped": reason})
            read.request_cancel(trial, by=self._by, reason=reason)
        except (PacelineError, OSError):
            if trial.record.exists():
                self._untold[trial.run_id] = trial, reason
                self._again_at = time.monotonic() + _AGAIN_S


class Stopping:
    """Stops trials of a sweep that goes on."""

    def __init__(self, sweep: SweepState) -> None:
        self._sweep = sweep
        self._canceling = Canceling(sweep.folder.run_id)

    def judge(self) -> None:
        """Stop what the policy names."""
        sweep = self._sweep
        if sweep.spec.stop is None:
            return
        # A policy goes on naming a trial until it is over, and its processes may take their time to end.
        for number, reason in sweep.spec.stop.stops(sweep.trials, sweep.spec.goal).items():
            if self._stop(number, reason):
                say(f"trial {number} is stopped: {reason}")

    def all(self, reason: str) -> None:
        """Stop all that run."""
        for number in self._sweep.live:
            self._stop(number, reason)

    def again(self) -> None:
        """As `Canceling.again`."""
        self._canceling.again()

    def _stop(self, number: int, reason: str) -> bool:
        # One that ended in the meantime is not touched: what it has reached stands as it is.
        return number in self._sweep.live and self._canceling.ask(self._sweep.folder_of(number), reason)
