"""The processes that see sweeps through: one for each, on the machine that it was submitted from.

A controller keeps nothing that is not in the sweep's record or its children's, so a sweep whose controller is gone has not
failed: whoever looks at it next starts another one. A module's name and a command line cross the line between layers here,
for `paceline.sweeps` stands above runs.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.runs import states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now
from paceline.system import detached, locks
from paceline.system.files import append_line
from paceline.system.library import library_dir

_MODULE = "paceline.sweeps"
#: Controllers that were started and never came to look at a trial; after so many, it is not a kill that ends them.
_MOST_STARTS = 3


def start(folder: RunFolder, lock_fd: int, python: str | None = None) -> None:
    """Start the sweep's controller, detached, and hand it the open lock. python: default this one.

    Raises:
        OSError: no process can be started.
    """
    with open(folder.driver_log, "ab") as log:
        detached.start(
            _MODULE,
            folder.path,
            lock_fd,
            python=python or sys.executable,
            library_dir=library_dir(folder.path.parents[1]),
            cwd=folder.path,
            stdout=log,
            stderr=log,
        )


def own(folder: RunFolder) -> RunRecord:
    """Note this process as the one that looks after the sweep, now that it can. For the holder of its lock."""
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
    """Start a controller for a sweep that has lost its own; the record as readers see it.

    give_up: is called before a sweep is written down as Failed that no controller can be had for.
    """
    # It goes on only on its own machine, for a user who may write its record; anybody else can but say so.
    if not store.was_here(record) or not os.access(folder.record, os.W_OK):
        host = record.owner.get("host")
        waiting = f"its controller is gone; the sweep goes on when its owner looks at it on {host}"
        return dataclasses.replace(record, status=states.NOT_RESPONDING, waiting_for=waiting)
    fd = locks.take(folder.lock)
    # Of several readers at once, one starts the controller.
    if fd is None:
        return store.shown(folder, record)
    try:
        # Read again, now that nobody else can write: the controller may have come to the sweep's end just before its own.
        record = store.stored(folder)
        if record.is_terminal:
            return record
        starts = record.owner.get("starts", 0) + 1
        if starts > _MOST_STARTS:
            message = f"The sweep's controller ended {_MOST_STARTS} times before it could begin. Its log says why."
            report = FailureReport(cause="supervisor", message=message, see=f"{folder.logs / 'driver.log'}")
            give_up(folder)
            return store.close_deserted(folder, record, report)
        # Written before the start: a controller that lives writes this anew.
        record = dataclasses.replace(record, owner={**record.owner, "starts": starts})
        store.write(folder, record)
        python = record.owner.get("python")
        # The interpreter that submitted the sweep may be gone with its environment; this one has Paceline as well.
        start(folder, fd, python if python and Path(python).exists() else None)
        return store.shown(folder, record)
    finally:
        # The controller has a descriptor of the same open file, by which the lock stays held.
        os.close(fd)
