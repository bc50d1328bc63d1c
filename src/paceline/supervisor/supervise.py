"""Supervise one run: its attempts, its outputs, and its end, which leaves no process or lock."""

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
from paceline.runs.claim import Claim
from paceline.runs.driver_log import say
from paceline.runs.failure import (
    EXIT_CANCELED,
    EXIT_PREEMPTED,
    EXIT_TIME_LIMIT,
    NODES_GONE,
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
from paceline.supervisor.diagnosis.retries import is_retried
from paceline.supervisor.logs import shorten_logs
from paceline.supervisor.outputs import (
    brought_home,
    rescue_states,
    settle_links,
    share_checkpoints,
    with_outputs_stored,
)
from paceline.supervisor.prepare import clean_nodes, give_nodes_back, hold_nodes
from paceline.supervisor.supervision import Outcome, Supervision
from paceline.system import processes
from paceline.system.files import is_full, read_json
from paceline.targets import target_of_run

#: If an attempt ends by these causes, the next one does not count as a restart: in any run, and in an elastic run.
_FREE, _FREE_IF_ELASTIC = frozenset({"preempted"}), frozenset({*NODES_GONE, "resized"})
#: Minimum number of seconds until an elastic run asks for more nodes again, after a restart that brought no more nodes.
_IN_VAIN_S = 60.0
#: How many times in a row a run may be preempted before all of its workers have started; then it fails.
_FRUITLESS = 10
#: Exit codes of workers that an engine (such as Slurm) kills; _SIGNAL_S: seconds until it signals the supervisor.
_KILLED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
_SIGNAL_S = 2.0


def supervise(folder: RunFolder, claim: Claim) -> None:
    """Supervise a run to its end. The caller holds the run's lock.

    An error after the run's record was read is not raised: it becomes the run's failure in the record.
    """
    run = Supervision(folder, claim)
    try:
        outcome = _outcome(run)
        settle_links(run, outcome)
        _finish(run, with_outputs_stored(run, outcome))
    except BaseException as error:
        _fail_internally(run, error)


def _outcome(run: Supervision) -> Outcome:
    try:
        run.target = target_of_run(run.folder.path)
        return _attempts(run)
    except (UserError, EngineError) as error:
        # No check at submit could find this error: the target has no such nodes, or the environment has no mpirun.
        cause = "engine" if isinstance(error, (TargetError, EngineError)) else "launcher"
        return Outcome(failure=FailureReport(cause=cause, message=str(error)))


def _attempts(run: Supervision) -> Outcome:
    """Run attempts until no restart follows. Return the last attempt's outcome.

    The run keeps its nodes between attempts if possible.
    """
    run.note_engine_restart()
    number = len(run.record.attempts)  # above 0 if an engine (such as Slurm) has requeued the job after an attempt
    tried, fruitless, failure = _tried(run.record), 0, None
    # Check this at the start: the engine restarts an interrupted job even if `max_restarts` allows no further attempt.
    if tried + _replaced(run.record) > run.job.max_restarts and number:
        return Outcome(failure=_interrupted(run.record))
    if number:
        run.reason = run.record.attempts[-1].cause or "preempted"
    while True:
        tried += 1
        run.may_leave_now()
        try:
            outcome = hold_nodes(run) if run.nodes is None else None
        except (TargetError, EngineError) as error:
            if (told := _told_to_end(run)) is not None:
                return Outcome(stopped=told)
            # Report an earlier attempt's failure, which matters more than this error about the nodes.
            if failure is None:
                raise
            message = f"{failure.message} There were no nodes for another attempt: {error}"
            return Outcome(failure=dataclasses.replace(failure, message=message))
        if outcome is not None:
            ended = outcome = _as_told(run, outcome)
        else:
            # An attempt that was stopped before its start is not in the record. The next attempt takes its number.
            number = len(run.record.attempts) + 1
            run.replacements_left = run.job.max_restarts + 1 - tried - _replaced(run.record)
            ended = _as_told(run, run_attempt(run, number))
            run.may_leave = False
            if _may_restart(run, ended, tried):
                rescue_states(run)
            outcome = brought_home(run, ended)
            _take_up_event_files(run, number)
            shorten_logs(run.folder, number)
            run.close_attempt(outcome)
        if outcome.stopped == "preempted":
            # A preemption is not a failure, so the next attempt does not count as a restart.
            tried -= 1
            fruitless = 0 if run.has_run else fruitless + 1
            if fruitless == _FRUITLESS:
                return Outcome(failure=_preempted_in_vain(run.record, run.leaves_for))
            run.reason = f"preempted: {run.leaves_for}"
            say(f"{run.leaves_for}. The run returns its nodes, waits in the queue and resumes.")
            give_nodes_back(run)
            continue
        if run.job.node_range:
            # If nodes repeatedly disappear before all workers have started, the run fails.
            fruitless = 0 if run.has_run else fruitless + 1
            if _goes_on(run, outcome) and fruitless < _FRUITLESS:
                tried -= 1
                # Don't name the lost node's missing files in the reason, because the log names them.
                run.reason = _reason(ended)
                say(f"{run.reason}. Starting the next attempt.")
                give_nodes_back(run)
                continue
        failure = outcome.failure
        if failure is None or not _allows_restart(run, failure, tried):
            return outcome
        whole = f"all workers start again: {outcome.whole}" if outcome.whole else ""
        say(f"attempt {tried} failed ({failure.cause}): {failure.message} Starting the next.")
        if whole:
            say(f"{whole}.")
        run.reason = f"restart after {failure.cause}{whole and f'; {whole}'}"
        if failure.cause in NODES_GONE or (run.nodes is not None and run.nodes.lost()):
            give_nodes_back(run)
        elif failure.cause == "port" and run.nodes is not None:
            run.nodes.renew_ports()  # the run stays on its nodes, so it keeps its queue position
        if run.nodes is not None:
            share_checkpoints(run)


def _may_restart(run: Supervision, outcome: Outcome, tried: int) -> bool:
    failure = outcome.failure
    if failure is None or outcome.stopped is not None:
        return False
    return bool(run.job.node_range and failure.cause in NODES_GONE) or _allows_restart(run, failure, tried)


def _allows_restart(run: Supervision, failure: FailureReport, tried: int) -> bool:
    return is_retried(failure, run.job) and tried + _replaced(run.record) <= run.job.max_restarts


def _as_told(run: Supervision, outcome: Outcome) -> Outcome:
    """Return the outcome, marked as stopped if Slurm or another engine ended the run."""
    failure = outcome.failure
    if failure is None or (failure.cause not in NODES_GONE and failure.exit_code not in _KILLED):
        return outcome
    told = _told_to_end(run)
    if told is None and run.has_to_leave():
        told = "preempted"
    return outcome if told is None else dataclasses.replace(outcome, failure=None, stopped=told)


def _told_to_end(run: Supervision) -> str | None:
    """Wait briefly for a signal by which Slurm, for example, ends the run. Return the reason."""
    if not run.folder.engine.exists():
        return None
    deadline = time.monotonic() + _SIGNAL_S
    while run.wake.stopped_by is None and (left := deadline - time.monotonic()) > 0:
        run.wake.sleep(left)
    return run.cancel_reason()


def _tried(record: RunRecord) -> int:
    """Return how many of the run's attempts count against `max_restarts`."""
    elastic = record.job is not None and record.job.node_range is not None
    free = _FREE_IF_ELASTIC if elastic else _FREE
    return sum(attempt.cause not in free for attempt in record.attempts)


def _replaced(record: RunRecord) -> int:
    """Return how many replacements of workers count against `max_restarts`."""
    return sum(len(attempt.replaced) for attempt in record.attempts)


def _goes_on(run: Supervision, outcome: Outcome) -> bool:
    """Return whether an elastic run continues with another number of nodes."""
    lost = outcome.failure is not None and outcome.failure.cause in NODES_GONE
    if outcome.stopped is not None or not (lost or outcome.resized):
        return False
    if outcome.resized and len(run.record.attempts) > 1:
        # If the last restart for more nodes brought none, wait longer before the next one.
        *_, before, last = run.record.attempts
        in_vain = before.cause == "resized" and len(last.nodes) <= len(before.nodes)
        run.elastic_s = max(2 * run.elastic_s, _IN_VAIN_S) if in_vain else run.job.elastic_seconds
    if run.nodes is not None:
        # A target always offers its simulated nodes again. Leave the lost nodes out of the next attempt, as a cluster would.
        is_here = run.nodes.shell(0) is None
        run.most = len(run.nodes.nodes) - max(1, outcome.lost) if lost and is_here else None
    return True


def _reason(outcome: Outcome) -> str:
    if outcome.resized or outcome.failure is None:
        return "more nodes"
    return outcome.failure.message.rstrip(".")


def _take_up_event_files(run: Supervision, number: int) -> None:
    if run.job.is_python or not run.folder.work.is_dir() or not run.record.attempts:
        return  # the worker of a Python script has logged these values already
    from paceline.trackers import event_followers

    since = parse_utc(run.record.attempts[-1].started_utc).timestamp()
    try:
        event_followers.take_up(run.folder, number, since=since, variables=run.job.environment_variables)
    # Catch every error: programs may have written anything here, and the run's end must not depend on it.
    except Exception as error:
        run.warn(f"event files of the run could not be read: {type(error).__name__}: {error}")


def _interrupted(record: RunRecord) -> FailureReport:
    last = record.attempts[-1]
    return FailureReport(
        cause="node_lost",
        message=f"Attempt {last.number} was interrupted: the node of its supervisor was lost. "
        f"max_restarts={record.job.max_restarts if record.job else 0} allows no further attempt.",
        exit_code=EXIT_PREEMPTED,
        attempt=last.number,
        see=logs_command(record.run_id),
    )


def _preempted_in_vain(record: RunRecord, why: str) -> FailureReport:
    return FailureReport(
        cause="preempted",
        message=f"{_FRUITLESS} times in a row the run lost its nodes before all its workers had started, the last time since "
        f"{why}. Submit it again when the nodes are free, or with a higher priority.",
        exit_code=EXIT_PREEMPTED,
        attempt=len(record.attempts) or None,
        see=logs_command(record.run_id),
    )


def _finish(run: Supervision, outcome: Outcome) -> None:
    """Release everything that the run holds, then write its end.

    Release first, because a program that sees the final state may immediately start a run that needs this run's queue
    position, nodes and ports.
    """
    run.to(states.FINALIZING, waiting_for=None)
    if not run.record.attempts:
        remove_containers(run.job, run.record.run_id)  # remove containers that examining an image may have left
    clean_nodes(run)
    # Take the time before releasing the nodes: the next run on them must not seem to start before the end of this run.
    ended_utc = utc_now()
    give_nodes_back(run)
    # Kill remaining processes only after releasing the nodes, because the links to the nodes are children of this process too.
    processes.kill_descendants(os.getpid())
    run.held.close()
    unlink_inputs(run.job, run.folder)
    run.claim.check()
    if outcome.stopped != "interrupted":
        work_dir.clean(run.folder)  # an interrupted run keeps it: the next attempt continues in it
    _release(run)
    _write_end(run, outcome, ended_utc)


def _release(run: Supervision) -> None:
    shutil.rmtree(run.folder.scratch, ignore_errors=True)
    run.claim.check()
    if run.target is not None:
        run.target.release(run.folder.path)


def _write_end(run: Supervision, outcome: Outcome, ended_utc: str) -> None:
    changes: dict[str, object] = {
        "ended_utc": ended_utc,
        "scratch_dir": None,
        "left_out": tuple(run.left_out[: excluded_files.LIMIT]),
        "left_out_count": len(run.left_out),
    }
    if outcome.stopped == "interrupted":
        # Write no final state: only the engine (such as Slurm) knows whether this is a cancel or a preemption with a restart.
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
    if run.job.notify:
        run.alerts.look(run.record, is_last=True)
        for why in run.messenger.wrong():
            run.warn(why)
        run.waiting("sending messages")
        changes["waiting_for"] = None
    store.remove_passing(run.folder)  # an earlier supervisor of the run may have been killed by the engine
    warned = len(run.record.warnings)
    run.to(status, **changes)
    for why in run.record.warnings[warned:]:
        say(f"warning: {why}")


def _fail_internally(run: Supervision, error: BaseException) -> None:
    run.claim.check()
    ended_utc = utc_now()  # take the time before anything is released, as in `_finish`
    with contextlib.suppress(Exception):  # no error may prevent the final record
        give_nodes_back(run)
    processes.kill_descendants(os.getpid())
    # Print the traceback with the interpreter's own function, which imports nothing and ignores errors of a full disk.
    sys.__excepthook__(type(error), error, error.__traceback__)
    remove_containers(run.job, run.record.run_id)
    _release(run)
    if run.record.is_terminal:
        return
    full = is_full(error)
    failing = isinstance(error, OSError) and error.errno in (errno.EIO, errno.EROFS)
    report = FailureReport(
        cause="disk" if full or failing else "internal",
        message=(
            f"The disk of {str(run.folder.path)!r} is full. Free some space and submit again."
            if full
            else f"The disk of {str(run.folder.path)!r} fails: {error}. Repair it and submit again."
            if failing
            else f"An error of Paceline's own: {type(error).__name__}: {error}. Please report it with the driver's log."
        ),
        see=f"cat {run.folder.driver_log}",
    )
    changes = {**store.failure_changes(run.record, report, ended_utc), "scratch_dir": None}
    _end(run, states.FAILED, **changes)


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
