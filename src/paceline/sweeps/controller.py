"""The controller of a sweep: it starts trials, judges their curves, and decides when the sweep ends."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

from paceline.children.engine import ParentController, counts_text
from paceline.errors import PacelineError
from paceline.runs import states, tags_and_properties
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import parse_utc
from paceline.sweeps import diagnosis, dispatch, pictures, results, start
from paceline.sweeps.diagnosis import Cause
from paceline.sweeps.dispatch import Dispatcher
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Trial, front, is_better
from paceline.sweeps.trial_runs import PAUSED, PROMOTED, RUNG, all_runs

#: Ratio of the time to judge the trials to the pause after it.
_JUDGING = 0.25
_LATEST_S = 0.3  # maximum seconds to pause after judging the trials
#: Number of Completed trials without the primary metric after which a sweep fails.
_WITHOUT_METRIC = 3
#: Maximum number of trials on the Pareto front that a message names.
_MOST_BEST = 3
#: Seconds between two messages on a new best trial: a sweep has many of them in its first seconds.
_BEST_S = 60.0


class Controller(ParentController[SweepState]):
    """The controller of one sweep: it starts, judges and stops trials."""

    CAUSE = "trials"

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder)
        self._dispatcher = Dispatcher(self.state)
        self._best: float | None = None
        self._leader: int | None = None
        self._told_leader: int | None = None
        self._tell_best_at = 0.0
        self._is_judged = True
        self._judge_at = 0.0

    @staticmethod
    def read_state(folder: RunFolder) -> SweepState:
        return SweepState(folder)

    def take_up(self) -> None:
        self.state.take_up()
        for trial in self.state.trials:
            self._say_if_best(trial)
        self._told_leader = self._leader

    def look(self) -> None:
        for trial in self.state.look():
            self._is_judged = False
            self._say_if_best(trial)
            if trial.is_over:
                self._say_ended(trial)
        if self._leader != self._told_leader and time.monotonic() >= self._tell_best_at:
            self._told_leader, self._tell_best_at = self._leader, time.monotonic() + _BEST_S
            self.state.check()
            self.messenger.tell(self.state.record, "best", best_text(self.state))
        self._take_more()

    def end_reason(self) -> str | None:
        return end_reason(self.state)

    def advance(self) -> None:
        before = time.monotonic()
        if not self._is_judged and before >= self._judge_at:
            self._is_judged = True
            self._judge()
            after = time.monotonic()
            self._judge_at = after + min(_LATEST_S, (after - before) / _JUDGING)
        self._dispatcher.fill()

    def is_done(self) -> bool:
        return self.state.is_done and not self._dispatcher.is_waiting

    def stop_all(self, reason: str) -> None:
        self.state.give_up_cut_off()
        for number in self.state.live:
            self.canceling.ask(self.state.folder_of(number), reason)

    def write_end(self) -> None:
        write_end(self.state)

    @staticmethod
    def living(folder: RunFolder) -> Iterator[RunFolder]:
        last = (records[-1] for records in all_runs(folder))
        return (RunFolder(folder.path.parent / record.run_id) for record in last if not record.is_terminal)

    @staticmethod
    def reopens(folder: RunFolder) -> bool:
        if not (folder.path / results.MORE).exists():
            return False
        start.count_anew(folder)
        return True

    def _judge(self) -> None:
        """Stop, pause or promote the trials that the sweep's policy selects."""
        sweep = self.state
        if sweep.spec.stop is None:
            return
        # The policy names a trial again at each call until the trial has ended; `ask` returns True only for the first request.
        for number, reason in sweep.spec.stop.stops(sweep.trials, sweep.spec.goal).items():
            # Skip a trial that has ended since the policy read it: the trial keeps its result.
            if number in sweep.live and self.canceling.ask(sweep.folder_of(number), reason):
                say(f"trial {number} is stopped: {reason}")
        if (policy := pausing(sweep.spec.stop)) is None:
            return
        for number, verdict in policy.judge(sweep.trials, sweep.spec.goal).items():
            folder = sweep.folder_of(number)
            if verdict.rung is not None:
                if not self.canceling.is_asked(folder):
                    self._promote(number, verdict.rung, verdict.why)
            # Don't pause a trial that a user has canceled, because a canceled trial never continues.
            elif not folder.cancel_request.exists() and self.canceling.ask(folder, verdict.why, PAUSED):
                sweep.trials[number] = dataclasses.replace(sweep.trials[number], paused=verdict.why)
                say(f"trial {number} is paused: {verdict.why}")

    def _promote(self, number: int, rung: int, why: str) -> None:
        """Let a running trial continue until `rung` logged values, and tag its run with `why`."""
        sweep = self.state
        sweep.check()
        notes = sweep.folder_of(number).notes
        with contextlib.suppress(OSError):
            # Remove a tag of an earlier controller that died after setting it and before canceling the run.
            tags_and_properties.remove_tags(notes, [PAUSED])
            tags_and_properties.set_tags(notes, {RUNG: rung, PROMOTED: why})
        sweep.trials[number] = dataclasses.replace(sweep.trials[number], rung=rung, paused=None)
        say(f"trial {number} runs on: {why}")

    def _say_ended(self, trial: Trial) -> None:
        sweep = self.state
        text = results.values_text(trial, sweep.spec) or f"no {sweep.spec.metric}"
        if sweep.spec.further and trial in (best := front(sweep.trials, sweep.spec.goals)):
            text += f", on the Pareto front of {len(best)}"
        if trial.status == states.FAILED:
            with contextlib.suppress(PacelineError):
                text += f"; {diagnosis.cause(sweep.folder_of(trial.number)).text}"
        say(f"trial {trial.number} is {trial.shown}: {text}")
        diagnosis.warn_of(sweep, trial)

    def _say_if_best(self, trial: Trial) -> None:
        spec = self.state.spec
        value = None if spec.further else trial.best(spec.goal)
        if value is None or (self._best is not None and not is_better(value, self._best, spec.goal)):
            return
        self._best = value
        if self._leader != trial.number:
            self._leader = trial.number
            say(f"trial {trial.number} has the best {spec.metric} so far: {value:g}")

    def _take_more(self) -> None:
        sweep = self.state
        if results.requested(sweep.folder):
            with results.more_locked(sweep.folder):
                count = results.requested(sweep.folder)
                sweep.spec = dataclasses.replace(sweep.spec, trials=sweep.spec.trials + count)
                # Write the spec first, then remove the request for more trials: a crash in between adds them twice.
                sweep.note(sweep=sweep.spec.to_json())
                (sweep.folder.path / results.MORE).unlink(missing_ok=True)
            say(f"{count} more trials were asked for: {sweep.spec.trials} in all")


def end_reason(sweep: SweepState) -> str | None:
    """Return why the sweep must end early, as a sentence, or None."""
    if sweep.folder.cancel_request.exists():
        return "the sweep is canceled"
    limit, started = sweep.spec.max_duration_seconds, sweep.spec.counted_utc or sweep.record.started_utc
    if limit is not None and started and time.time() > parse_utc(started).timestamp() + limit:
        return f"the sweep has come to its limit of {limit:g} s"
    # Compute the failure only when a trial has changed, because `_failure` reads all trials.
    if sweep.judged != (sweep.changes, sweep.is_done):
        sweep.judged = sweep.changes, sweep.is_done
        failure = _failure(sweep)
        sweep.failure = None if failure is None else failure.text
    return sweep.failure


def write_end(sweep: SweepState) -> None:
    """Write the sweep's tables and pictures, then its final state."""
    # Write the tables before the final state: readers of an ended sweep expect them in its outputs.
    sweep.to(states.FINALIZING)
    dispatch.tag_waiting(sweep)
    results.write_table(sweep.folder, sweep.spec, sweep.trials)
    if any(trial.curve for trial in sweep.trials):
        pictures.run(sweep.folder)
    # `_failure` looks only at the trials: a sweep that has reached its time limit has not failed.
    failure = _failure(sweep)
    report = FailureReport(cause="trials", message=failure.text, see=failure.see) if failure else None
    counts = counts_text("trial", (trial.shown for trial in sweep.trials))
    sweep.close(report, f"{best_text(sweep)}\n{counts}".lstrip())


def best_text(sweep: SweepState) -> str:
    """Return the best trial, or the first trials on the Pareto front, as text."""
    lines = []
    for trial in results.best_trials(sweep.trials, sweep.spec)[:_MOST_BEST]:
        leg = trial.best_leg(sweep.spec.goal)
        lines.append(f"best: {leg.run_id}, {results.values_text(trial, sweep.spec)}; {results.point_text(leg.values)}")
    return "\n".join(lines)


def _failure(sweep: SweepState) -> Cause | None:
    # Trials that failed before `paceline sweep more` do not count, or they would end the sweep again.
    counted = sweep.trials[sweep.spec.counted_from :]
    failed = [trial for trial in counted if trial.status == states.FAILED]
    most = sweep.spec.max_failures
    if most is not None and len(failed) >= most:
        return _because(f"{len(failed)} trials have failed, and max_failures is {most}.", sweep, failed)
    completed = [trial for trial in counted if trial.status == states.COMPLETED]
    has_metric = any(all(trial.curves) for trial in sweep.trials)
    # A sweep of one or two trials can never reach `_WITHOUT_METRIC`, so all its trials are enough.
    if not has_metric and len(completed) >= min(_WITHOUT_METRIC, sweep.spec.trials):
        count = len(completed)
        ended = "1 trial has ended, and it has not" if count == 1 else f"{count} trials have ended, and none has"
        return Cause(text=f"{ended} logged the primary metric. {sweep.no_metric(completed[0])}")
    if message := dispatch.without_checkpoints(sweep):
        return Cause(text=message)
    # Wait for live trials, because a live trial may still complete.
    if failed and sweep.is_done and not sweep.live and all(trial.status == states.FAILED for trial in sweep.trials):
        return _because("all trials have failed.", sweep, sweep.trials)
    return None


def _because(text: str, sweep: SweepState, failed: Sequence[Trial]) -> Cause:
    common = diagnosis.common(sweep, failed)
    return dataclasses.replace(common, text=f"{text} {common.text}")
