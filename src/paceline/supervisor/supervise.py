"""See one run through: attempt after attempt, the outputs, and the end, after which nothing of it is left."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import sys
import time
from typing import Any

from paceline.errors import EngineError, TargetError, UserError
from paceline.runs import excluded_files, remote_status, states, store, work_dir
from paceline.runs.driver_log import say
from paceline.runs.failure import (
    EXIT_CANCELED,
    EXIT_PREEMPTED,
    EXIT_TIME_LIMIT,
    FailureReport,
    logs_command,
    signal_name,
)
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, parse_utc, utc_now
from paceline.runs.run_data import unlink_inputs
from paceline.runs.store import remove_containers
from paceline.supervisor.attempt import run_attempt
from paceline.supervisor.diagnosis.evidence import alone_text
from paceline.supervisor.diagnosis.retries import NODES_GONE, is_retried
from paceline.supervisor.logs import shorten_logs
from paceline.supervisor.outputs import brought_home, settle_links, with_outputs_stored
from paceline.supervisor.prepare import clean_nodes, give_nodes_back, hold_nodes
from paceline.supervisor.supervision import Outcome, Supervision
from paceline.system import processes
from paceline.system.files import read_json
from paceline.targets import target_of_run

#: Causes of an attempt's end that are no restart of an elastic run's.
_OF_NODES = frozenset({*NODES_GONE, "resized"})
#: After a growth that brought no node, the next one comes no sooner, and each time twice as late.
_IN_VAIN_S = 60.0
#: So often in a row may the nodes of an elastic run be lost before all of its workers have begun.
_FRUITLESS = 10
#: Exit codes of workers that somebody ended, and how long after them the supervisor's own signal may come.
_KILLED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
_SIGNAL_S = 2.0


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
    tried, fruitless, failure = _tried(run.record), 0, None
    # The engine starts a job again that it has interrupted; the run may have no attempt left by then.
    if tried > run.job.max_restarts and number:
        return Outcome(failure=_interrupted(run.record))
    if number:
        run.reason = "preempted"
    while True:
        tried += 1
        run.has_run = False
        try:
            outcome = hold_nodes(run) if run.nodes is None else None
        except (TargetError, EngineError) as error:
            if (told := _told_to_end(run)) is not None:
                return Outcome(stopped=told)
            # Without a failure of an attempt this is the first, and its own error says all.
            if failure is None:
                raise
            return Outcome(failure=_extended(failure, f"There were no nodes for another attempt: {error}"))
        if outcome is not None:
            ended = outcome = _as_told(run, outcome)
        else:
            number += 1
            ended = _as_told(run, run_attempt(run, number))
            outcome = brought_home(run, ended)
            _take_up_event_files(run, number)
            shorten_logs(run.folder, number)
            run.close_attempt(outcome)
        if run.job.node_range:
            # Nodes that go before their workers have all begun may never do: so often in a row, and the run has failed.
            fruitless = 0 if run.has_run else fruitless + 1
            if _goes_on(run, outcome) and fruitless < _FRUITLESS:
                tried -= 1
                # Without what could not be brought home from the lost node, which the log has told.
                run.reason = _reason(ended)
                say(f"{run.reason}. Starting the next attempt.")
                give_nodes_back(run)
                continue
        failure = outcome.failure
        if failure is None or not is_retried(failure, run.job) or tried > run.job.max_restarts:
            return outcome
        say(f"attempt {tried} failed ({failure.cause}): {failure.message} Starting the next.")
        run.reason = f"restart after {failure.cause}"
        if failure.cause in NODES_GONE or (run.nodes is not None and run.nodes.lost()):
            give_nodes_back(run)
        elif failure.cause == "port" and run.nodes is not None:
            run.nodes.renew_ports()  # on the same nodes: the run keeps its turn


def _as_told(run: Supervision, outcome: Outcome) -> Outcome:
    """Return the outcome, without the failure where that is what an engine's end of the whole job looks like from here."""
    failure = outcome.failure
    if failure is None or (failure.cause not in NODES_GONE and failure.exit_code not in _KILLED):
        return outcome
    told = _told_to_end(run)
    return outcome if told is None else dataclasses.replace(outcome, failure=None, stopped=told)


def _told_to_end(run: Supervision) -> str | None:
    """Return why the run is to end, or None. An engine signals all of a job's processes, and the supervisor may be the last."""
    if not run.folder.engine.exists():
        return None
    deadline = time.monotonic() + _SIGNAL_S
    while run.wake.stopped_by is None and (left := deadline - time.monotonic()) > 0:
        run.wake.sleep(left)
    return run.cancel_reason()


def _tried(record: RunRecord) -> int:
    """The attempts so far that count against `max_restarts`: of an elastic run none that ended for its nodes."""
    elastic = record.job is not None and record.job.node_range is not None
    return sum(not (elastic and attempt.cause in _OF_NODES) for attempt in record.attempts)


def _goes_on(run: Supervision, outcome: Outcome) -> bool:
    """True if an elastic run goes on with other nodes after this, which is no restart; notes with how many at most."""
    lost = outcome.failure is not None and outcome.failure.cause in NODES_GONE
    if outcome.stopped is not None or not (lost or outcome.resized):
        return False
    if outcome.resized and len(run.record.attempts) > 1:
        # What was to be had was gone, or is none after all: not so soon again.
        *_, before, last = run.record.attempts
        in_vain = before.cause == "resized" and len(last.nodes) <= len(before.nodes)
        run.elastic_s = max(2 * run.elastic_s, _IN_VAIN_S) if in_vain else run.job.elastic_seconds
    if run.nodes is not None:
        # This machine's stand-ins are never gone. One that counts as lost is back with the next growth.
        is_here = run.nodes.shell(0) is None
        run.most = len(run.nodes.nodes) - max(1, outcome.lost) if lost and is_here else None
    return True


def _reason(outcome: Outcome) -> str:
    if outcome.resized or outcome.failure is None:
        return "more nodes"
    return outcome.failure.message.rstrip(".")


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
        "left_out": tuple(run.left_out[: excluded_files.LIMIT]),
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
    has to be in it. All else of the run is gone and given back by now.
    """
    if run.job.notify:
        # Not above: what sends takes a fifth of the time in which a supervisor starts, and few runs tell of their end.
        from paceline.supervisor import notify

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
    traceback.
    """
    ended_utc = utc_now()  # before anything is given back, as in `_finish`
    with contextlib.suppress(Exception):  # whatever it is, it must not keep the record from its end
        give_nodes_back(run)
    processes.kill_descendants(os.getpid())
    # The interpreter's own: nothing has to be loaded for it, and a full disk is no error of its.
    sys.__excepthook__(type(error), error, error.__traceback__)
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
