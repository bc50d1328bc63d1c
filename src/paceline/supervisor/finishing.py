"""The end of a run: nothing left behind, then the last record."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import traceback
from typing import Any

from paceline.runs import left_out, remote_status, states, work_dir
from paceline.runs.containers import remove_containers
from paceline.runs.failure import (
    EXIT_CANCELED,
    EXIT_TIME_LIMIT,
    FailureReport,
    logs_command,
    signal_name,
)
from paceline.runs.input_links import unlink_inputs
from paceline.runs.record import RunRecord, utc_now
from paceline.supervisor.attempt import Outcome
from paceline.supervisor.diagnosis.alone import alone_text
from paceline.supervisor.driver_log import say
from paceline.supervisor.preparing import clean_nodes, give_nodes_back
from paceline.supervisor.supervision import Supervision
from paceline.system import processes
from paceline.system.files import read_json


def finish(run: Supervision, outcome: Outcome) -> None:
    """Leave nothing behind, then write the end."""
    run.to(states.FINALIZING, waiting_for=None)
    if not run.record.attempts:
        remove_containers(run.job, run.record.run_id)  # of an image that was being looked at
    clean_nodes(run)
    # Before anybody else can have what this run has held: runs follow each other in their times too.
    ended_utc = utc_now()
    give_nodes_back(run)
    processes.kill_descendants(os.getpid())
    run.held.close()
    unlink_inputs(run.job, run.folder)
    if outcome.stopped != "interrupted":
        work_dir.clean(run.folder)  # else the next attempt goes on in it
    shutil.rmtree(run.folder.scratch, ignore_errors=True)
    if run.target is not None:
        run.target.release(run.folder.path)
    _write_end(run, outcome, ended_utc)


def _write_end(run: Supervision, outcome: Outcome, ended_utc: str) -> None:
    changes: dict[str, Any] = {
        "ended_utc": ended_utc,
        "scratch_dir": None,
        "left_out": tuple(run.left_out[: left_out.LIMIT]),
        "left_out_count": len(run.left_out),
    }
    if outcome.stopped == "interrupted":
        # A preemption, or somebody's cancel: the engine knows, and readers ask it. It may start the job again.
        say("the engine has asked for the end of its job; the workers were ended")
        run.to(states.QUEUED, waiting_for="interrupted by the engine", scratch_dir=None)
    elif outcome.stopped == "cancel":
        say(f"canceled. {outcome.stalled}" if outcome.stalled else "canceled")
        run.to(states.CANCELED, exit_code=EXIT_CANCELED, canceled_by=_canceled_by(run), **changes)
    elif outcome.stopped == "time_limit":
        by_engine = run.wake.stopped_by == signal.SIGUSR2
        report = _time_limit_report(run.record, outcome.stalled, by_engine=by_engine)
        run.to(states.FAILED, failure=report, exit_code=EXIT_TIME_LIMIT, **changes)
    elif outcome.failure is not None:
        say(outcome.failure.message)
        run.to(states.FAILED, failure=outcome.failure, exit_code=outcome.failure.exit_code, **changes)
    else:
        if (warning := alone_text(run.job, run.folder, len(run.record.attempts))) is not None:
            run.warn(warning)
        run.to(states.COMPLETED, exit_code=0, **changes)


def fail_internally(run: Supervision, error: BaseException) -> None:
    """An error of ours, or of the disk's: end everything, say so in the record, the traceback in the driver's log."""
    ended_utc = utc_now()  # before anything is given back, as in `finish`
    with contextlib.suppress(Exception):  # whatever it is, it must not keep the record from its end
        give_nodes_back(run)
    processes.kill_descendants(os.getpid())
    with contextlib.suppress(OSError):  # a full disk
        traceback.print_exception(error)
    remove_containers(run.job, run.record.run_id)
    shutil.rmtree(run.folder.scratch, ignore_errors=True)
    if run.target is not None:
        run.target.release(run.folder.path)
    if run.record.is_terminal:
        return
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    report = FailureReport(
        cause="disk" if full else "internal",
        message=(
            f"The disk of {str(run.folder.path)!r} is full. Free some space and submit again."
            if full
            else f"An error of Paceline's own: {type(error).__name__}: {error}. Please report it with the driver's log."
        ),
        see=f"cat {run.folder.driver_log}",
    )
    run.to(states.FAILED, failure=report, exit_code=1, ended_utc=ended_utc, scratch_dir=None)


def _canceled_by(run: Supervision) -> str:
    if run.folder.cancel_request.exists():
        return str((read_json(run.folder.cancel_request) or {}).get("by", "unknown"))
    if by := remote_status.engine(run.folder).get("by"):
        return str(by)
    return signal_name(run.wake.stopped_by or 0)


def _time_limit_report(record: RunRecord, stalled: str | None, *, by_engine: bool) -> FailureReport:
    limit = record.job.max_run_duration_seconds if record.job else None
    message = (
        f"The time that {record.target!r} gives the job was nearly up, and the workers were ended. Ask for more time."
        if by_engine
        else f"The run took longer than max_run_duration_seconds={limit:g} and was ended."
    )
    return FailureReport(
        cause="time_limit",
        message=f"{message} {stalled}" if stalled else message,
        exit_code=EXIT_TIME_LIMIT,
        attempt=len(record.attempts) or None,
        see=logs_command(record.run_id),
    )
