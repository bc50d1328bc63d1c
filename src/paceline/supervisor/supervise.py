"""See one run through: attempt after attempt, the outputs, and the end, after which nothing of it is left."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import traceback
from typing import Any

from paceline.errors import EngineError, TargetError, UserError
from paceline.runs import left_out, remote_status, states, store, work_dir
from paceline.runs.containers import remove_containers
from paceline.runs.failure import (
    EXIT_CANCELED,
    EXIT_PREEMPTED,
    EXIT_TIME_LIMIT,
    FailureReport,
    logs_command,
    signal_name,
)
from paceline.runs.folder import RunFolder
from paceline.runs.input_links import unlink_inputs
from paceline.runs.record import RunRecord, parse_utc, utc_now
from paceline.supervisor import notify
from paceline.supervisor.attempt import run_attempt
from paceline.supervisor.diagnosis.evidence import alone_text
from paceline.supervisor.diagnosis.retries import NODES_GONE, is_retried
from paceline.supervisor.logs import say, shorten_logs
from paceline.supervisor.outputs import brought_home, settle_links, with_outputs_stored
from paceline.supervisor.prepare import clean_nodes, give_nodes_back, hold_nodes
from paceline.supervisor.supervision import Outcome, Supervision
from paceline.system import processes
from paceline.system.files import read_json
from paceline.targets import target_of_run


def supervise(folder: RunFolder) -> None:
    """See the run of this folder to its end. The caller holds the run's lock. Never raises once the record can be read."""
    run = Supervision(folder)
    try:
        outcome = _outcome(run)
        settle_links(run, outcome)
        _finish(run, with_outputs_stored(run, outcome))
    except BaseException as error:
        _fail_internally(run, error)


def _outcome(run: Supervision) -> Outcome:
    """The outcome of the run's last attempt, or of the failure that left it without one."""
    try:
        run.target = target_of_run(run.folder.path)
        return _attempts(run)
    except (UserError, EngineError) as error:
        # What only the nodes could show: the job can't have them, or the environment that was made has no mpirun.
        cause = "engine" if isinstance(error, (TargetError, EngineError)) else "launcher"
        return Outcome(failure=FailureReport(cause=cause, message=str(error)))


def _attempts(run: Supervision) -> Outcome:
    """Run attempt after attempt; the outcome of the last. Each runs on the nodes of the one before, unless these are gone.

    Raises:
        UserError: there never were any nodes, or what only they could show: the environment has no mpirun.
    """
    run.note_preemption()
    number = len(run.record.attempts)  # not 0 where the engine has put the job back into its queue
    # The engine starts a job again that it has interrupted; the run may have no attempt left by then.
    if number > run.job.max_restarts and number:
        return Outcome(failure=_interrupted(run.record))
    tried, failure = number, None
    while True:
        tried += 1
        try:
            outcome = hold_nodes(run) if run.nodes is None else None
        except (TargetError, EngineError) as error:
            # Without a failure of an attempt this is the first, and its own error says all.
            if failure is None:
                raise
            return Outcome(failure=_extended(failure, f"There were no nodes for another attempt: {error}"))
        if outcome is None:
            number += 1
            outcome = brought_home(run, run_attempt(run, number))
            _take_up_event_files(run, number)
            shorten_logs(run.folder, number, run.job.world_size)
            run.close_attempt(outcome)
        failure = outcome.failure
        if failure is None or not is_retried(failure, run.job) or tried > run.job.max_restarts:
            return outcome
        say(f"attempt {tried} failed ({failure.cause}): {failure.message} Starting the next.")
        if failure.cause in NODES_GONE or (run.nodes is not None and run.nodes.lost()):
            give_nodes_back(run)
        elif failure.cause == "port" and run.nodes is not None:
            run.nodes.renew_ports()  # on the same nodes: the run keeps its turn


def _take_up_event_files(run: Supervision, number: int) -> None:
    if run.job.is_python or not run.folder.work.is_dir() or not run.record.attempts:
        return  # a worker's Python has told its values itself
    from paceline.trackers import left_files

    since = parse_utc(run.record.attempts[-1].started_utc).timestamp()
    try:
        left_files.take_up(run.folder, number, since=since, variables=run.job.environment_variables)
    # They are the programs' files, and may be anything: the run has ended as it has.
    except Exception as error:
        run.warn(f"event files of the run could not be read: {type(error).__name__}: {error}")


def _interrupted(record: RunRecord) -> FailureReport:
    """The report of a run that its engine has started again though it has no attempt left."""
    last = record.attempts[-1]
    return FailureReport(
        cause="preempted",
        message=f"Attempt {last.number} was interrupted: the engine took its nodes away or lost them. "
        f"max_restarts={record.job.max_restarts if record.job else 0} allows no further attempt.",
        exit_code=EXIT_PREEMPTED,
        attempt=last.number,
        see=logs_command(record.run_id),
    )


def _extended(report: FailureReport, text: str) -> FailureReport:
    return dataclasses.replace(report, message=f"{report.message} {text}")


def _finish(run: Supervision, outcome: Outcome) -> None:
    """Leave nothing behind, then write the end.

    The order matters: whoever reads a final state may start the next run at once, in this run's place in the queue, on its
    nodes and ports. So all of that is given back before the record says so.
    """
    run.to(states.FINALIZING, waiting_for=None)
    if not run.record.attempts:
        remove_containers(run.job, run.record.run_id)  # of an image that was being looked at
    clean_nodes(run)
    # Taken before the nodes are given back: a run that gets them next must not seem to have begun before this one ended.
    ended_utc = utc_now()
    give_nodes_back(run)
    # After the nodes, whose links to other machines are children of this process.
    processes.kill_descendants(os.getpid())
    run.held.close()
    unlink_inputs(run.job, run.folder)
    if outcome.stopped != "interrupted":
        work_dir.clean(run.folder)  # an interrupted run's next attempt goes on in it
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
        _end(run, states.CANCELED, exit_code=EXIT_CANCELED, canceled_by=_canceled_by(run), **changes)
    elif outcome.stopped == "time_limit":
        by_engine = run.wake.stopped_by == signal.SIGUSR2
        report = _time_limit_report(run.record, outcome.stalled, by_engine=by_engine)
        _end(run, states.FAILED, failure=report, exit_code=EXIT_TIME_LIMIT, **changes)
    elif outcome.failure is not None:
        say(outcome.failure.message)
        _end(run, states.FAILED, failure=outcome.failure, exit_code=outcome.failure.exit_code, **changes)
    else:
        if (warning := alone_text(run.job, run.folder, len(run.record.attempts))) is not None:
            run.warn(warning)
        _end(run, states.COMPLETED, exit_code=0, **changes)


def _end(run: Supervision, status: str, **changes: Any) -> None:
    """Tell whoever wants to know, then write the end: a final record is never written again, and what went wrong in the telling
    has to be in it. All else of the run is gone and given back by now."""
    if run.job.notify:
        # As `store.change` will have it.
        if status == states.CANCELED and (failed := store.failed_by_hand(run.folder)) is not None:
            status, changes = states.FAILED, {**changes, **failed}
        run.waiting("telling of its end")
        for why in notify.tell(run.folder, dataclasses.replace(run.record, status=status, **changes), run.secrets):
            run.warn(why)
        changes["waiting_for"] = None
    run.to(status, **changes)


def _fail_internally(run: Supervision, error: BaseException) -> None:
    """End everything after an error of Paceline's own, or of the disk's; the record tells it, the driver's log has the
    traceback."""
    ended_utc = utc_now()  # before anything is given back, as in `_finish`
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
    _end(run, states.FAILED, failure=report, exit_code=1, ended_utc=ended_utc, scratch_dir=None)


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
