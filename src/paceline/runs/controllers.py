"""The processes that see sweeps and pipelines through: one for each, on the machine that it was submitted from, or of a sweep in
a job of its engine.

A controller keeps nothing that is not in the run's record or its children's, so a run whose controller is gone has not
failed: whoever looks at it next starts another one. A module's name and a command line cross the line between layers here,
for what has children stands above runs.
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
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now
from paceline.system import detached_process, locks
from paceline.system.detached_process import library_dir
from paceline.system.files import append_line, write_json

#: Kind of a run -> the module that sees it through.
_MODULES = {"sweep": "paceline.sweeps", "pipeline": "paceline.pipelines"}
#: Controllers that were started and never came to look at a child; after so many, it is not a kill that ends them.
_MOST_STARTS = 3


def is_controlled(record: RunRecord) -> bool:
    """Whether a controller sees the run through, rather than a supervisor or the program that logs it."""
    return record.kind in _MODULES


def start(folder: RunFolder, lock_fd: int, python: str | None = None) -> None:
    """Start the run's controller, detached, and hand it the open lock. python: default this one.

    Where a sweep says so it is a job of the trials' engine, which takes the lock itself.

    Raises:
        OSError: no process can be started.
        TargetError: the engine refuses it.
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
    """Note this process as the one that looks after the run, now that it can. For the holder of its lock."""
    record = dataclasses.replace(store.stored(folder), owner={**store.owner(), "python": sys.executable})
    store.write(folder, record)
    return record


def reopen(folder: RunFolder, record: RunRecord) -> None:
    """Let a sweep that has ended go on. For the holder of its lock."""
    again = dataclasses.replace(
        record, status=states.RUNNING, ended_utc=None, exit_code=None, failure=None, canceled_by=None
    )
    append_line(folder.events, {"time_utc": utc_now(), "status": again.status, "message": "more trials"})
    store.write(folder, again)


def resume(folder: RunFolder, record: RunRecord, give_up: Callable[[RunFolder], None]) -> RunRecord:
    """Start a controller for a run that has lost its own; the record as readers see it.

    give_up: is called before a run is written down as Failed that no controller can be had for.
    """
    # It goes on only on its own machine, for the user who wrote its record; anybody else can but say so.
    if not store.was_here(record) or not store.is_mine(folder.record):
        host = record.owner.get("host")
        waiting = f"its controller is gone; the {record.kind} goes on when its owner looks at it on {host}"
        return dataclasses.replace(record, status=states.NOT_RESPONDING, waiting_for=waiting)
    fd = locks.take(folder.lock)
    # Of several readers at once, one starts the controller.
    if fd is None:
        return store.shown(folder, record)
    try:
        # Read again, now that nobody else can write: the controller may have come to the run's end just before its own.
        record = store.stored(folder)
        if record.is_terminal:
            return record
        return _again(folder, record, fd, give_up)
    finally:
        # The controller has a descriptor of the same open file, by which the lock stays held.
        os.close(fd)


def in_engine(folder: RunFolder, record: RunRecord, give_up: Callable[[RunFolder], None]) -> RunRecord:
    """The record of a sweep whose controller is a job of an engine, by its word; another one is started where it is gone.

    give_up: as for `resume`.
    """

    def goes_on(folder: RunFolder, record: RunRecord, found: remote_status.JobStatus) -> RunRecord | None:
        if found.cause == "canceled":
            if not RunFolder(folder.path.parent / f"{folder.run_id}_0").record.exists():
                return None  # nothing is left that had to be ended
            if not folder.cancel_request.exists():
                # Whoever ends the controller's job ends the sweep: another one sees to its trials' end.
                write_json(folder.cancel_request, {"by": found.by or "the engine", "time_utc": utc_now()})
        try:
            return _again(folder, record, -1, give_up, found.message)
        except (PacelineError, OSError) as error:
            return dataclasses.replace(record, status=states.NOT_RESPONDING, waiting_for=str(error))

    return remote_status.read(folder, record, goes_on)


def _again(
    folder: RunFolder, record: RunRecord, fd: int, give_up: Callable[[RunFolder], None], why: str = ""
) -> RunRecord:
    """Start one more controller. For the holder of the lock. why: the one before has ended, as far as it is known."""
    starts = record.owner.get("starts", 0) + 1
    if starts > _MOST_STARTS:
        message = f"The {record.kind}'s controller ended {_MOST_STARTS} times before it could begin. {why or 'Its log says why.'}"
        report = FailureReport(cause="supervisor", message=message, see=f"{folder.logs / 'driver.log'}")
        give_up(folder)
        return store.close_deserted(folder, record, report)
    # Written before the start: a controller that lives writes this anew.
    record = dataclasses.replace(record, owner={**record.owner, "starts": starts})
    store.write(folder, record)
    python = record.owner.get("python")
    # The interpreter that submitted the run may be gone with its environment; this one has Paceline as well.
    start(folder, fd, python if python and Path(python).exists() else None)
    return store.shown(folder, record)
