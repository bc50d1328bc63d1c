"""Trials that are stopped: by the sweep's policy, and all of them at its end."""

from __future__ import annotations

import contextlib
import dataclasses

from paceline.controlling.canceling import Canceling
from paceline.runs import tags_and_properties
from paceline.runs.driver_log import say
from paceline.sweeps.children import PAUSED, PROMOTED, RUNG
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.sweep_state import SweepState


class Stopping:
    """Stops trials of a sweep that goes on."""

    def __init__(self, sweep: SweepState) -> None:
        self._sweep = sweep
        self._canceling = Canceling(f"sweep {sweep.folder.run_id}")

    def judge(self) -> None:
        """Stop what the policy names."""
        sweep = self._sweep
        if sweep.spec.stop is None:
            return
        # A policy goes on naming a trial until it is over, and its processes may take their time to end.
        for number, reason in sweep.spec.stop.stops(sweep.trials, sweep.spec.goal).items():
            if self._stop(number, reason):
                say(f"trial {number} is stopped: {reason}")
        if (policy := pausing(sweep.spec.stop)) is None:
            return
        for number, verdict in policy.judge(sweep.trials, sweep.spec.goal).items():
            if verdict.rung is None:
                self._pause(number, verdict.why)
            elif not self._canceling.is_asked(sweep.folder_of(number)):
                self._let_on(number, verdict.rung, verdict.why)

    def all(self, reason: str) -> None:
        """Stop all that run."""
        self._sweep.give_up_cut_off()
        for number in self._sweep.live:
            self._stop(number, reason)

    def again(self) -> None:
        """As `Canceling.again`."""
        self._canceling.again()

    def _pause(self, number: int, why: str) -> None:
        sweep = self._sweep
        folder = sweep.folder_of(number)
        # One that is canceled by hand ends for good.
        if not folder.cancel_request.exists() and self._canceling.ask(folder, why, PAUSED):
            sweep.trials[number] = dataclasses.replace(sweep.trials[number], paused=why)
            say(f"trial {number} is paused: {why}")

    def _let_on(self, number: int, rung: int, why: str) -> None:
        """Let a trial go on beyond a rung while it runs; its notes say so, for a controller that takes over."""
        sweep = self._sweep
        folder = sweep.folder_of(number)
        with contextlib.suppress(OSError):
            # An earlier controller may have died when it had written that it is paused, and had not told it.
            tags_and_properties.remove_tags(folder.notes, [PAUSED])
            tags_and_properties.set_tags(folder.notes, {RUNG: rung, PROMOTED: why})
        sweep.trials[number] = dataclasses.replace(sweep.trials[number], rung=rung, paused=None)
        say(f"trial {number} runs on: {why}")

    def _stop(self, number: int, reason: str) -> bool:
        # One that ended in the meantime is not touched: what it has reached stands as it is.
        return number in self._sweep.live and self._canceling.ask(self._sweep.folder_of(number), reason)
