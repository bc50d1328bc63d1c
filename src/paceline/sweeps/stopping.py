"""Trials that are stopped: by the sweep's policy, and all of them at its end."""

from __future__ import annotations

import contextlib

from paceline.errors import PacelineError
from paceline.runs import read, tags_and_properties
from paceline.supervisor.logs import say
from paceline.sweeps.sweep_state import SweepState


class Stopping:
    """Cancels trials, each once."""

    def __init__(self, sweep: SweepState) -> None:
        self._sweep = sweep
        self._stopped: set[int] = set()

    def judge(self) -> None:
        """Stop what the policy names."""
        sweep = self._sweep
        if sweep.spec.stop is None:
            return
        for number, reason in sweep.spec.stop.stops(sweep.trials, sweep.spec.goal).items():
            if self._stop(number, reason):
                say(f"trial {number} is stopped: {reason}")

    def all(self, reason: str) -> None:
        """Stop all that run."""
        for number in self._sweep.live:
            self._stop(number, reason)

    def _stop(self, number: int, reason: str) -> bool:
        """Whether it is told only now."""
        # A policy goes on naming a trial until it is over, and its processes may take their time to end. One that ended in the
        # meantime is not touched: what it has reached stands as it is.
        if number not in self._sweep.live or number in self._stopped:
            return False
        self._stopped.add(number)
        folder = self._sweep.folder_of(number)
        # Who canceled the trial by hand keeps that as its reason.
        if not folder.cancel_request.exists():
            # A trial that can't be told now runs on to its own end, which harms nothing but the time it takes.
            with contextlib.suppress(PacelineError, OSError):
                # The tag goes first, so that whoever sees the trial end can read why.
                tags_and_properties.set_tags(folder.notes, {"stopped": reason})
                read.request_cancel(folder, by=f"sweep {self._sweep.folder.run_id}", reason=reason)
        return True
