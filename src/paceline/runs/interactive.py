"""Runs that a program logs by itself: `Experiment.start_logging`, `Run.child_run`.

The program that makes one holds its lock, so it is the record's one writer. If the program is killed, the run is
shown as Failed; if it ends of itself and has not said how the run ended, the run ends as the program did: Failed
after an exception, else Completed (Python tells nobody at exit of a `sys.exit(3)`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from pathlib import Path

from paceline.errors import PacelineError, RunStateError
from paceline.runs import artifacts, read, states, store
from paceline.runs.failure import EXIT_CANCELED, FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id, new_run_id
from paceline.runs.record import RunRecord, user_name, utc_now

#: Run folder -> the open file that holds its lock, and the pid of the process that made it (a fork inherits both).
_ours: dict[RunFolder, tuple[int, int]] = {}

_Seen = dict[str, tuple[int, int]]
#: Run folder -> each folder that is watched for it, the name that its files have in the run, and what of it is kept or was there.
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
    """The folder of a new run that this process looks after, Running unless begin=False.

    Raises:
        FileNameError: `run_id` has not the form of a run's id.
        RunStateError: there is a run of this id.
    """
    run_id = check_run_id(run_id) if run_id else new_run_id(experiment)
    folder = RunFolder(runs_dir / run_id)
    # For the message; of two programs at once, the second fails at the rename in `store.create`.
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
        owner=store.owner(),
    )
    fd = store.create(runs_dir, record)
    # Handlers run in reverse order, so those that the program registers after this one still find its runs alive.
    if not _ours:
        atexit.register(_end_all)
    _ours[folder] = (fd, os.getpid())
    if begin:
        store.change(folder, record, states.RUNNING, started_utc=utc_now())
    return folder


def is_ours(folder: RunFolder) -> bool:
    """True if this process looks after the run."""
    return folder in _ours and _ours[folder][1] == os.getpid()


def begin(folder: RunFolder) -> None:
    """NotStarted -> Running; a run that runs stays as it is."""
    record = read.record(folder)
    if record.status == states.NOT_STARTED:
        store.change(folder, record, states.RUNNING, started_utc=utc_now())


def end(folder: RunFolder, status: str, details: object = None, code: str | None = None) -> None:
    """Write the run's end and let it go. On a submitted run nothing happens: its supervisor sees its end.

    Raises:
        RunStateError: another process, which lives, looks after the run.
    """
    record = read.record(folder)
    if record.is_terminal or record.kind != "interactive":
        return
    if not is_ours(folder):
        raise RunStateError(
            f"run {folder.run_id} is logged by process {record.owner.get('pid')} on {record.owner.get('host')}; "
            "only that process can end it."
        )
    # A program that was asked for its end and came to it has been canceled, however it puts that itself.
    if status == states.COMPLETED and folder.cancel_request.exists():
        status = states.CANCELED
    report = _report(folder, details, code) if status == states.FAILED else None
    # Before the end is written: whoever sees it finds all files.
    unwatch(folder)
    store.change(
        folder,
        record,
        status,
        ended_utc=utc_now(),
        # A child that was never begun has taken no time, which is another thing than an unknown one.
        started_utc=record.started_utc or utc_now(),
        failure=report,
        exit_code={states.COMPLETED: 0, states.FAILED: 1}.get(status, EXIT_CANCELED),
    )
    # After the record: a reader who finds the lock free before the end is written takes the run for deserted.
    os.close(_ours.pop(folder)[0])


def _report(folder: RunFolder, details: object, code: str | None) -> FailureReport:
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


def _end_all() -> None:
    """At the end of the program: its unfinished runs end as it does."""
    # The interpreter leaves here the exception that it has printed for want of a handler; after sys.exit() there is none.
    error = getattr(sys, "last_value", None)
    # A child that was forked may come here as well, with its parent's runs: they are not its own to end.
    for folder in list(_ours):
        if is_ours(folder):
            # One whose folder was deleted meanwhile must not keep the others from their end.
            with contextlib.suppress(PacelineError, OSError):
                end(folder, states.FAILED if error else states.COMPLETED, error)


def watch_folders(folder: RunFolder, outputs: Path) -> None:
    """Make `outputs`, and watch it and `./logs` for the run. A folder that can't be made is not watched."""
    if outputs.is_symlink():
        return  # in a worker `outputs` is the submitted run's own, not this one's
    folders = [(outputs.absolute(), "outputs"), (Path("logs").absolute(), "logs")]
    with contextlib.suppress(OSError):
        outputs.mkdir(parents=True, exist_ok=True)
    # What lies there from before belongs to no run, or to an earlier one.
    _watched[folder] = [(path, name, _stamps(path)) for path, name in folders]


def keep_watched(folder: RunFolder) -> None:
    """Copy what is new or has changed since."""
    for path, name, seen in _watched.get(folder, ()):
        for inside, stamp in _stamps(path).items():
            if seen.get(inside) == stamp:
                continue
            kept = folder.path / name / inside
            # The program's own files may change until the run ends: the copy follows them.
            with contextlib.suppress(OSError, PacelineError):
                kept.unlink(missing_ok=True)
                artifacts.put(folder, f"{name}/{inside}", path / inside)
                seen[inside] = stamp


def unwatch(folder: RunFolder) -> None:
    """Copy what is new, for the last time."""
    keep_watched(folder)
    _watched.pop(folder, None)


def _stamps(top: Path) -> _Seen:
    found: _Seen = {}
    for where, _, names in os.walk(top):
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(OSError):
                # Neither links, which may lead anywhere, nor pipes.
                stat = os.lstat(path)
                if (stat.st_mode & 0o170000) == 0o100000:
                    found[os.path.relpath(path, top)] = (stat.st_mtime_ns, stat.st_size)
    return found
