"""A sweep's own supervisor: proposes points, hands trials over, judges their curves, and says how it all ended.

All that it has to know lies in the sweep's record and its children's. So another one, started in its place, goes on where it
was: it reads the children, and the next number is the first that is not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time

from paceline.errors import PacelineError
from paceline.runs import states, store
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now
from paceline.sweeps import causes, ending, remarks, results
from paceline.sweeps.front import front
from paceline.sweeps.handing_over import HandingOver
from paceline.sweeps.stopping import Stopping
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Trial, is_better
from paceline.system.files import read_json

#: Between two looks at the trials that run: a core has nothing to do for half of it, on average, when a trial has ended.
_LOOK_S = 0.05
#: Of thousands of trials a policy takes its time: at most this share of the controller's, and no judgement later than this.
_JUDGING = 0.25
_LATEST_S = 0.3


class Controller:
    """Sees one sweep through. For the holder of its lock."""

    def __init__(self, folder: RunFolder) -> None:
        self.sweep = SweepState(folder)
        self._handing_over = HandingOver(self.sweep)
        self._stopping = Stopping(self.sweep)
        self._best: float | None = None
        self._leader: int | None = None
        self._is_judged = True
        self._judge_at = 0.0

    def run(self, record: RunRecord) -> None:
        """To the sweep's end, which is written down; or until its folder is gone. record: the sweep's, as it is now."""
        sweep = self.sweep
        sweep.record = record
        sweep.take_up()
        for trial in sweep.trials:
            self._tell_best(trial)
        if sweep.record.status != states.RUNNING:
            started = sweep.record.started_utc or utc_now()
            sweep.record = store.change(sweep.folder, sweep.record, states.RUNNING, started_utc=started)
        while True:
            if not sweep.folder.record.exists():
                # Removed by hand: nobody could ask for the end of what runs any more, and it can't be written down.
                self._stopping.all("the sweep's folder is gone")
                return
            changed = sweep.look()
            for trial in changed:
                self._tell(trial)
            self._take_more()
            self._stopping.again()
            if end := ending.wanted(sweep):
                self._stopping.all(end)
                if not sweep.live:
                    break
            else:
                self._judge(bool(changed))
                self._handing_over.fill()
                if not sweep.live and sweep.is_done and not self._handing_over.is_waiting:
                    break
            time.sleep(_LOOK_S)
        ending.write(sweep)

    def _judge(self, has_changed: bool) -> None:
        self._is_judged &= not has_changed
        before = time.monotonic()
        if not self._is_judged and before >= self._judge_at:
            self._is_judged = True
            self._stopping.judge()
            after = time.monotonic()
            self._judge_at = after + min(_LATEST_S, (after - before) / _JUDGING)

    def _tell(self, trial: Trial) -> None:
        self._tell_best(trial)
        if not trial.is_over:
            return
        sweep = self.sweep
        what = results.said(trial, sweep.spec) or f"no {sweep.spec.metric}"
        if sweep.spec.further and trial in (best := front(sweep.trials, sweep.spec.goals)):
            what += f", on the Pareto front of {len(best)}"
        if trial.status == states.FAILED:
            with contextlib.suppress(PacelineError):
                what += f"; {causes.cause(sweep.folder_of(trial.number)).text}"
        say(f"trial {trial.number} is {trial.shown}: {what}")
        remarks.warn_of(sweep, trial)

    def _tell_best(self, trial: Trial) -> None:
        spec = self.sweep.spec
        value = None if spec.further else trial.best(spec.goal)
        if value is None or (self._best is not None and not is_better(value, self._best, spec.goal)):
            return
        self._best = value
        if self._leader != trial.number:
            self._leader = trial.number
            say(f"trial {trial.number} has the best {spec.metric} so far: {value:g}")

    def _take_more(self) -> None:
        """What `paceline sweep more` has asked for while the sweep runs."""
        sweep = self.sweep
        request = sweep.folder.path / results.MORE
        asked = read_json(request)
        if isinstance(asked, dict) and isinstance(asked.get("trials"), int):
            sweep.spec = dataclasses.replace(sweep.spec, trials=sweep.spec.trials + asked["trials"])
            # Written before the request goes: a kill in between adds the trials twice, the other order would lose them.
            sweep.note(sweep=sweep.spec.to_json())
            request.unlink(missing_ok=True)
            say(f"{asked['trials']} more trials were asked for: {sweep.spec.trials} in all")
