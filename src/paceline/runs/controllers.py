"""Start and restart the controllers of sweeps and pipelines, as local processes or jobs of an engine.

A controller keeps all its state in the records of its run and of the run's children. So a run that lost its controller has not
failed, and the next reader starts a new controller. `runs` must not import the controllers' modules, so it starts them by name.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.errors import PacelineError
from paceline.runs import remote_status, states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder, has_own_record
from paceline.runs.record import RunRecord, utc_now
from paceline.system import detached_process, locks
from paceline.system.detached_process import library_dir
from paceline.system.files import append_line, write_json

#: Kind of a run -> the module that controls runs of this kind.
_MODULES = {"sweep": "paceline.sweeps", "pipeline": "paceline.pipelines"}
#: After this many controllers in a row that ended before they checked any child run, the parent run fails.
_MOST_STARTS = 3


def is_controlled(record: RunRecord) -> bool:
    """Return whether a controller process owns the run: a sweep or a pipeline."""
    return record.kind in _MODULES


def start(folder: RunFolder, lock_fd: int, python: str | None = None) -> None:
    """Start the controller of a sweep or pipeline, and pass it the run's lock.

    A sweep's settings may request a controller that runs as a job of the trials' engine, and takes the lock itself.

    python: Interpreter of the controller. By default, it is this process's interpreter.

    Raises:
        OSError: The process cannot be started.
        TargetError: The engine refuses the job.
    """
    record = store.stored(folder)
    if (record.sweep or {}).get("controller"):
        folder.gone.unlink(missing_ok=True)
        remote_status.teller(folder).start_controller(
            folder.path, library_dir(folder.path.parents[1]), python or sys.executable
        )
        return
    with open(folder.driver_log, "ab") as log:
        detached_process.start(
            _MODULES[record.kind],
            folder.path,
            lock_fd,
            python=python or sys.executable,
            library_dir=library_dir(folder.path.parents[1]),
            cwd=folder.path,
            stdout=log,
            stderr=log,
        )


def own(folder: RunFolder) -> RunRecord:
    """Record this process as the run's owner. The process must hold the run's lock."""
    record = dataclasses.replace(store.stored(folder), owner={**store.owner(), "python": sys.executable})
    store.write(folder, record)
    return record


def reopen(folder: RunFolder, record: RunRecord) -> None:
    """Set an ended sweep to Running for more trials. The caller holds its lock."""
    again = dataclasses.replace(
        record, status=states.RUNNING, ended_utc=None, exit_code=None, failure=None, canceled_by=None
    )
    append_line(folder.events, {"time_utc": utc_now(), "status": again.status, "message": "more trials"})
    folder.told.unlink(missing_ok=True)  # the next end of the run then notifies the receivers again
    store.write(folder, again)


def resume(folder: RunFolder, record: RunRecord, give_up: Callable[[RunFolder], None]) -> RunRecord:
    """Start a new controller for a sweep or pipeline that has lost its controller.

    Return the run's record. If several controllers have ended at their start, call `give_up`, then record the run as Failed.
    """
    # Only the user that the record names can resume the run, and only on the machine of the lost controller.
    if not store.was_here(record) or not has_own_record(folder):
        host = record.owner.get("host")
        waiting = f"its controller is gone; the {record.kind} goes on when its owner looks at it on {host}"
        return dataclasses.replace(record, status=states.NOT_RESPONDING, waiting_for=waiting)
    fd = locks.take(folder.lock)
    # Another process holds the lock and starts the controller, so this process must not start one.
    if fd is None:
        return store.shown(folder, record)
    try:
        # Read the record again under the lock, because the controller may have ended the run just before it exited.
        record = store.stored(folder)
        if record.is_terminal:
            return record
        return _again(folder, record, fd, give_up)
    finally:
        # Close only this process's descriptor. The controller has inherited the open lock file, and so keeps the lock.
        os.close(fd)


def in_engine(folder: RunFolder, record: RunRecord, give_up: Callable[[RunFolder], None]) -> RunRecord:
    """Return a sweep's record. Restart a lost controller that ran as a cluster job.

    If several controllers have ended at their start, call `give_up`, then record the sweep as Failed.
    """

    def goes_on(folder: RunFolder, record: RunRecord, found: remote_status.JobStatus) -> RunRecord | None:
        if found.cause == "cancel":
            if not RunFolder(folder.path.parent / f"{folder.run_id}_0").state.exists():
                return None  # no trials exist, so none have to be canceled
            if not folder.cancel_request.exists():
                # A user canceled the sweep by canceling its job in the engine. A new controller then has to end the trials.
                write_json(folder.cancel_request, {"by": found.by or "the engine", "time_utc": utc_now()})
        try:
            return _again(folder, record, -1, give_up, found.message)
        except (PacelineError, OSError) as error:
            return dataclasses.replace(record, status=states.NOT_RESPONDING, waiting_for=str(error))

    return remote_status.read(folder, record, goes_on)


def _again(
    folder: RunFolder, record: RunRecord, fd: int, give_up: Callable[[RunFolder], None], why: str = ""
) -> RunRecord:
    """Start a new controller, and return the record. The caller holds the lock.

    why: How the previous controller ended, or "". give_up: Called before the run fails, because controllers end at their start.
    """
    starts = record.owner.get("starts", 0) + 1
    if starts > _MOST_STARTS:
        message = f"The {record.kind}'s controller ended {_MOST_STARTS} times before it could begin. {why or 'Its log says why.'}"
        report = FailureReport(cause="supervisor", message=message, see=f"{folder.logs / 'driver.log'}")
        give_up(folder)
        return store.close_deserted(folder, record, report)
    # Write the record before starting the controller, because the controller writes the record too.
    record = dataclasses.replace(record, owner={**record.owner, "starts": starts})
    store.write(folder, record)
    python = record.owner.get("python")
    # If the environment of the submitting interpreter was removed, use the current interpreter.
    start(folder, fd, python if python and Path(python).exists() else None)
    return store.shown(folder, record)
