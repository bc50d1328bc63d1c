"""Why a sweep ends before its time, and what is written down at its end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from paceline.controlling import canceling, ending
from paceline.runs import states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import parse_utc
from paceline.sweeps import causes, continuing, results
from paceline.sweeps.causes import Cause
from paceline.sweeps.children import all_runs
from paceline.sweeps.pictures import run as pictures
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Trial

#: Completed trials without the primary metric, and none with it, that end a sweep.
_WITHOUT_METRIC = 3


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
    continuing.end(sweep)
    results.write_table(sweep.folder, sweep.spec, sweep.trials)
    # Without a single value there is nothing to see.
    if any(trial.curve for trial in sweep.trials):
        pictures.run(sweep.folder)
    # A sweep that has come to its time limit has not failed: it has done what it could in the time that it was given.
    failure = _failure(sweep)
    report = FailureReport(cause="trials", message=failure.text, see=failure.see) if failure else None
    sweep.record = ending.close(sweep.folder, sweep.record, report)


def give_up(folder: RunFolder, error: Exception) -> None:
    """End a sweep whose controller can't go on: its trials are ended, and it has Failed. For the holder of its lock."""

    def living() -> Iterator[RunFolder]:
        for records in all_runs(folder):
            if not records[-1].is_terminal:
                yield RunFolder(folder.path.parent / records[-1].run_id)

    canceling.give_up(folder, error, "trials", living)


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
    if nothing := continuing.without_checkpoints(sweep):
        return Cause(text=nothing)
    # While trials run one of them may still complete.
    if failed and sweep.is_done and not sweep.live and all(trial.status == states.FAILED for trial in sweep.trials):
        return _because("all trials have failed.", sweep, sweep.trials)
    return None


def _because(text: str, sweep: SweepState, failed: Sequence[Trial]) -> Cause:
    common = causes.common(sweep, failed)
    return dataclasses.replace(common, text=f"{text} {common.text}")
