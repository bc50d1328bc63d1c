"""Runs that a program logs by itself, from `Experiment.start_logging` or `Run.child_run`.

The program holds the run's lock, so it is the only writer of the record. If the program is killed, the run becomes
Failed. If it exits without ending the run, the run is Failed after an exception or `sys.exit(3)`, Canceled after
Ctrl-C, and Completed otherwise. Meanwhile, new files in `./outputs` and `./logs` are copied into the run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from paceline.errors import PacelineError, RunStateError
from paceline.runs import artifacts, read, states, store
from paceline.runs.failure import EXIT_CANCELED, FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id, new_run_id
from paceline.runs.record import RunRecord, user_name, utc_now

#: Run folder -> (descriptor that holds the run's lock, pid of the run's creator). A forked child process inherits this dict.
_ours: dict[RunFolder, tuple[int, int]] = {}

#: The argument of the last call of `sys.exit` in the main thread, because the interpreter does not keep it.
_exit_code: object = None

_Seen = dict[str, tuple[int, int]]
#: Run folder -> list of watched folders: (path, name in the run, files that were copied or existed before the run).
_watched: dict[RunFolder, list[tuple[Path, str, _Seen]]] = {}


def create(
    runs_dir: Path,
    experiment: str,
    *,
    run_id: str | None = None,
    parent_run_id: str | None = None,
    begin: bool = True,
    snapshot_id: str | None = None,
) -> RunFolder:
    """Create a run that this process logs, and return its folder.

    The run is Running, or NotStarted with begin=False.

    Raises:
        FileNameError: `run_id` is not a valid id.
        RunStateError: A run with this id exists.
    """
    run_id = check_run_id(run_id) if run_id else new_run_id(experiment)
    folder = RunFolder(runs_dir / run_id)
    # Check this early, for a clear message. If two programs create the same id at once, `store.create` fails in one of them.
    if folder.path.exists():
        raise RunStateError(f"there is a run {run_id!r} already. Give another run_id, or none.")
    record = RunRecord(
        run_id=run_id,
        experiment=experiment,
        kind="interactive",
        parent_run_id=parent_run_id,
        created_utc=utc_now(),
        submitted_by=user_name(),
        target="local",
        snapshot_id=snapshot_id,
        # The kernel of a notebook and `python -c` have no script, and their command lines say nothing about the program.
        program=tuple(sys.argv) if hasattr(sys.modules["__main__"], "__file__") else (),
        owner=store.owner(),
    )
    fd = store.create(runs_dir, record)
    # atexit calls handlers in reverse order. So handlers that the program registers later find its runs still open.
    _watch_end()
    _ours[folder] = (fd, os.getpid())
    if begin:
        store.change(folder, record, states.RUNNING, started_utc=utc_now())
    return folder


def is_ours(folder: RunFolder) -> bool:
    """Return whether this process logs the run."""
    return folder in _ours and _ours[folder][1] == os.getpid()


def begin(folder: RunFolder) -> None:
    """Set a NotStarted run, which this process logs, to Running."""
    record = read.record(folder)
    if record.status == states.NOT_STARTED:
        store.change(folder, record, states.RUNNING, started_utc=utc_now())


def end(folder: RunFolder, status: str, details: object = None, code: str | None = None) -> None:
    """Record the run's final status and release its lock; ignore submitted runs.

    Raises:
        RunStateError: Another live process owns the run.
    """
    record = read.record(folder)
    if record.is_terminal or record.kind != "interactive":
        return
    if not is_ours(folder):
        raise RunStateError(
            f"run {folder.run_id} is logged by process {record.owner.get('pid')} on {record.owner.get('host')}; "
            "only that process can end it."
        )
    # A program that completes counts as canceled if somebody has requested the run's end before.
    if status == states.COMPLETED and folder.cancel_request.exists():
        status = states.CANCELED
    report = _report(details, code) if status == states.FAILED else None
    # Copy the files before writing the end, so that a reader of the end finds all files.
    unwatch(folder)
    store.change(
        folder,
        record,
        status,
        ended_utc=utc_now(),
        # If a child run never began, use this time as its start, so that its duration is 0 instead of unknown.
        started_utc=record.started_utc or utc_now(),
        failure=report,
        exit_code={states.COMPLETED: 0, states.FAILED: 1}.get(status, EXIT_CANCELED),
    )
    # Unlock only after writing the record, because a reader that finds the lock free earlier regards the run as abandoned.
    os.close(_ours.pop(folder)[0])


def _report(details: object, code: str | None = None) -> FailureReport:
    if isinstance(details, FailureReport):
        return details
    exception = full = None
    if isinstance(details, BaseException):
        exception = "".join(traceback.format_exception_only(type(details), details)).strip()
        full = "".join(traceback.format_exception(type(details), details, details.__traceback__))
        details = exception
    text = str(details) if details is not None else "fail() was called without details."
    return FailureReport(
        cause="exception" if exception else "user",
        message=f"{code}: {text}" if code else text,
        exception=exception,
        traceback=full,
    )


def end_of_program() -> tuple[str, FailureReport | None]:
    """Return the final state and failure (or None) of the runs that this program logs."""
    # The interpreter stores an uncaught exception in sys.last_value, but not a SystemExit.
    error = getattr(sys, "last_value", None)
    # In a notebook or a prompt (sys.ps1), an exception ends a cell, not the program.
    if error is not None and not hasattr(sys, "ps1"):
        if isinstance(error, KeyboardInterrupt):
            return states.CANCELED, None
        return states.FAILED, _report(error)
    # Any truthy argument of sys.exit means failure: sys.exit("text") exits with code 1. sys.exit(False) exits with code 0.
    if _exit_code:
        text = f"The program ended with sys.exit({_exit_code!r})."
        return states.FAILED, FailureReport(cause="exception", message=text)
    return states.COMPLETED, None


@functools.cache
def _watch_end() -> None:
    atexit.register(_end_all)
    leave = sys.exit

    # Use `wraps`, which keeps the name `sys.exit`, because pickle finds a function by its name.
    @functools.wraps(leave)
    def exit_and_note(status: str | int | None = None, /) -> NoReturn:
        global _exit_code
        # Ignore a call in another thread, because sys.exit then ends only that thread, and not the program.
        if threading.current_thread() is threading.main_thread():
            _exit_code = status
        leave(status)

    sys.exit = exit_and_note


def _end_all() -> None:
    status, report = end_of_program()
    # A forked child inherits `_ours` with the runs of its parent process. It must leave these runs open.
    for folder in list(_ours):
        if is_ours(folder):
            # After an error, such as a deleted folder, continue with the program's other runs.
            with contextlib.suppress(PacelineError, OSError):
                end(folder, status, report)


def watch_folders(folder: RunFolder, outputs: Path) -> None:
    """Watch `outputs` and `./logs`, whose new files are copied into the run."""
    if outputs.is_symlink():
        return  # a worker's `outputs` is a link to the folder of its run
    folders = [(outputs.absolute(), "outputs"), (Path("logs").absolute(), "logs")]
    with contextlib.suppress(OSError):
        outputs.mkdir(parents=True, exist_ok=True)
    # Record the stamps of files that exist before the run. Later copy only new files and files with changed stamps.
    _watched[folder] = [(path, name, _stamps(path)) for path, name in folders]


def keep_watched(folder: RunFolder) -> None:
    """Copy new and changed files of the watched folders into the run."""
    for path, name, seen in _watched.get(folder, ()):
        for inside, stamp in _stamps(path).items():
            if seen.get(inside) == stamp:
                continue
            kept = folder.path / name / inside
            # The program may change its files until the run ends, so copy changed files again.
            with contextlib.suppress(OSError, PacelineError):
                kept.unlink(missing_ok=True)
                artifacts.put(folder, f"{name}/{inside}", path / inside)
                seen[inside] = stamp


def unwatch(folder: RunFolder) -> None:
    """Copy new and changed files a last time, then stop watching the folders."""
    keep_watched(folder)
    _watched.pop(folder, None)


def _stamps(top: Path) -> _Seen:
    found: _Seen = {}
    for where, _, names in os.walk(top):
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(OSError):
                # Record only regular files, because a link may lead to any place.
                stat = os.lstat(path)
                if (stat.st_mode & 0o170000) == 0o100000:
                    found[os.path.relpath(path, top)] = (stat.st_mtime_ns, stat.st_size)
    return found
