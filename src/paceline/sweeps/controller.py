"""A sweep's own supervisor: proposes points, hands trials over, judges their curves, and says how it all ended.

All that it has to know lies in the sweep's record and its children's. So another one, started in its place, goes on where it
was: it reads the children, and the next number is the first that is not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

from paceline.children import engine, retries
from paceline.children.retries import Canceling
from paceline.errors import PacelineError
from paceline.runs import states, store, tags_and_properties
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, parse_utc, utc_now
from paceline.sweeps import diagnosis, dispatch, results
from paceline.sweeps.diagnosis import Cause
from paceline.sweeps.dispatch import HandingOver
from paceline.sweeps.pictures import draw as pictures
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Trial, front, is_better
from paceline.sweeps.trial_runs import PAUSED, PROMOTED, RUNG, all_runs
from paceline.system.files import read_json

#: Between two looks at the trials that run: a core has nothing to do for half of it, on average, when a trial has ended.
_LOOK_S = 0.05
#: Of thousands of trials a policy takes its time: at most this share of the controller's, and no judgement later than this.
_JUDGING = 0.25
_LATEST_S = 0.3

#: Completed trials without the primary metric, and none with it, that end a sweep.
_WITHOUT_METRIC = 3


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
            if end := wanted(sweep):
                self._stopping.all(end)
                if not sweep.live:
                    break
            else:
                self._judge(bool(changed))
                self._handing_over.fill()
                if not sweep.live and sweep.is_done and not self._handing_over.is_waiting:
                    break
            time.sleep(_LOOK_S)
        write(sweep)

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
                what += f"; {diagnosis.cause(sweep.folder_of(trial.number)).text}"
        say(f"trial {trial.number} is {trial.shown}: {what}")
        diagnosis.warn_of(sweep, trial)

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


def wanted(sweep: SweepState) -> str | None:
    """Why the sweep is to end before its time; None while it goes on."""
    if sweep.folder.cancel_request.exists():
        return "the sweep is canceled"
    limit, started = sweep.spec.max_duration_seconds, sweep.spec.counted_utc or sweep.record.started_utc
    if limit is not None and started and time.time() > parse_utc(started).timestamp() + limit:
        return f"the sweep has come to its limit of {limit:g} s"
    # It goes through all trials, and between two of their changes nothing new comes of it.
    if sweep.judged != (sweep.changes, sweep.is_done):
        sweep.judged = sweep.changes, sweep.is_done
        found = _failure(sweep)
        sweep.failure = None if found is None else found.text
    return sweep.failure


def write(sweep: SweepState) -> None:
    """Write down the end of a sweep none of whose trials runs any more."""
    # Readers must not take the sweep for ended before its table lies in the outputs.
    sweep.record = store.change(sweep.folder, sweep.record, states.FINALIZING)
    dispatch.end(sweep)
    results.write_table(sweep.folder, sweep.spec, sweep.trials)
    # Without a single value there is nothing to see.
    if any(trial.curve for trial in sweep.trials):
        pictures.run(sweep.folder)
    # A sweep that has come to its time limit has not failed: it has done what it could in the time that it was given.
    failure = _failure(sweep)
    report = FailureReport(cause="trials", message=failure.text, see=failure.see) if failure else None
    sweep.record = engine.close(sweep.folder, sweep.record, report)


def give_up(folder: RunFolder, error: Exception) -> None:
    """End a sweep whose controller can't go on: its trials are ended, and it has Failed. For the holder of its lock."""

    def living() -> Iterator[RunFolder]:
        for records in all_runs(folder):
            if not records[-1].is_terminal:
                yield RunFolder(folder.path.parent / records[-1].run_id)

    retries.give_up(folder, error, "trials", living)


def _failure(sweep: SweepState) -> Cause | None:
    # What ended the sweep before it was asked for more does not end it again.
    counted = sweep.trials[sweep.spec.counted_from :]
    failed = [trial for trial in counted if trial.status == states.FAILED]
    most = sweep.spec.max_failures
    if most is not None and len(failed) >= most:
        return _because(f"{len(failed)} trials have failed, and max_failures is {most}.", sweep, failed)
    completed = [trial for trial in counted if trial.status == states.COMPLETED]
    # The 3 is lowered for a sweep of one or two trials, which could never come to three.
    if len(completed) >= min(_WITHOUT_METRIC, sweep.spec.trials) and not any(
        all(trial.curves) for trial in sweep.trials
    ):
        hint = sweep.no_metric(completed[0])
        ended = (
            "1 trial has ended, and it has not"
            if len(completed) == 1
            else f"{len(completed)} trials have ended, and none has"
        )
        return Cause(text=f"{ended} logged the primary metric. {hint}")
    if nothing := dispatch.without_checkpoints(sweep):
        return Cause(text=nothing)
    # While trials run one of them may still complete.
    if failed and sweep.is_done and not sweep.live and all(trial.status == states.FAILED for trial in sweep.trials):
        return _because("all trials have failed.", sweep, sweep.trials)
    return None


def _because(text: str, sweep: SweepState, failed: Sequence[Trial]) -> Cause:
    common = diagnosis.common(sweep, failed)
    return dataclasses.replace(common, text=f"{text} {common.text}")
