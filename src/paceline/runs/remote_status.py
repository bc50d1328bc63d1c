"""Runs whose supervisor is inside an engine's job, on another machine: a sign of life comes from the engine.

    engine.json     {"engine": "slurm", "job_id": "123"}: written by the submitting program, before and after it has
                    given the job to the engine
                    with "mirrored": true where the job sees another folder than this one, which is then a copy
    run.json        written by the supervisor, once the engine has started the job
    gone            since when the engine knows the job no longer, while the record is not final

A file lock says nothing across machines whose file system may not pass it on. So whoever reads such a record asks the
engine, through the target that the run was submitted to; targets keep the engine's answers for a few seconds, for all
runs together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypedDict, TypeVar, cast

from paceline.errors import PacelineError, RunNotFoundError, RunStateError
from paceline.runs import states, store, work_dir
from paceline.runs.failure import EXIT_CANCELED, EXIT_PREEMPTED, EXIT_TIME_LIMIT, FailureReport, logs_command
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now
from paceline.system import locks
from paceline.system.files import read_json
from paceline.system.lazy_import import from_above

#: What a job's end leaves behind needs a moment to be seen through a shared file system.
_GRACE_S = 10.0

QUEUED, RUNNING, GONE, UNREACHABLE = "queued", "running", "gone", "unreachable"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus:
    """An engine's word on a run's job.

    state: "queued", "running", "gone" (ended, or never heard of) or "unreachable" (the engine does not answer).
    message: what a queued job waits for; how one ended that is gone; why the engine can't be reached.
    cause: of a job that is gone: "canceled" or a key of `paceline.runs.failure.CAUSES`. by: who has canceled it.
    """

    state: str
    message: str = ""
    cause: str = "engine"
    by: str | None = None


class Teller(Protocol):
    """A target, for runs that it has given to an engine."""

    def look(self, folder: RunFolder, record: RunRecord) -> JobStatus:
        """The engine's word on the run, no older than some seconds; the run's folder here is brought up to date."""

    def cancel(self, folder: RunFolder, record: RunRecord) -> None:
        """Ask for the end of the run's job, beside `cancel.json`, which its supervisor looks for."""

    def channel(self, folder: RunFolder) -> Channel | None:
        """Return a channel to the run's supervisor for one command, or None if it shares this folder."""

    def start_controller(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """As `paceline.targets.Controlling`, for targets that are."""


#: Given a record whose job is gone, and the engine's word on that: what is done in place of writing down the run's end, the
#: record then; None where the run is to end.
GoesOn: TypeAlias = "Callable[[RunFolder, RunRecord, JobStatus], RunRecord | None]"


def read(folder: RunFolder, record: RunRecord, goes_on: GoesOn | None = None) -> RunRecord:
    """The record as it is now, by the engine's word; its end is written first where the supervisor can't any more.

    goes_on: is called before that, by the holder of the run's lock.
    """
    if not _is_mine(folder):
        # Whoever has submitted it asks the engine. The record is their supervisor's.
        return store.shown(folder, record)
    try:
        found = teller(folder).look(folder, record)
    # This one first: an engine that does not answer is an OSError, too.
    except PacelineError as error:
        found = JobStatus(state=UNREACHABLE, message=str(error))
    except OSError as error:  # this machine's: no room for what comes back, say
        found = JobStatus(state=UNREACHABLE, message=f"{error.filename or folder.path}: {error.strerror or error}")
    record = store.stored(folder)  # it may have changed while the engine answered
    if record.is_terminal:
        return record
    if found.state != GONE:
        with contextlib.suppress(OSError):
            # The engine knows the job again, after a restart of its own for one: if it forgets it once more, the time begins
            # anew.
            folder.gone.unlink(missing_ok=True)
    if found.state == UNREACHABLE:
        return dataclasses.replace(record, status=states.NOT_RESPONDING, waiting_for=found.message)
    if found.state == QUEUED:
        return store.shown(
            folder, dataclasses.replace(record, status=states.QUEUED, waiting_for=found.message or record.waiting_for)
        )
    if found.state == RUNNING:
        return store.shown(folder, record)
    return _gone(folder, record, found, goes_on)


def refresh(folder: RunFolder) -> None:
    """Bring here what the run has logged and written since somebody last asked, where its folder here is a copy of one that
    this machine does not see. Before that is read, by people or their programs.

    As quick as `read`: targets ask no more than about once a second. What can't be brought now stays as old as it is:
    `status` says why.
    """
    # A process of the run is where the run is, and its folder is the one that is copied.
    if not is_copy(folder) or os.environ.get("PACELINE_RUN_ID") == folder.run_id:
        return
    if folder.path.parents[1] in store.only_shown:
        return
    with contextlib.suppress(RunNotFoundError, OSError):
        record = store.stored(folder)
        if not record.is_terminal:  # else all is here: the end comes last
            read(folder, record)


class HasFolder(Protocol):
    """A handle on a run."""

    @property
    def folder(self) -> RunFolder: ...


_Handle = TypeVar("_Handle", bound=HasFolder)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def reads(
    method: Callable[Concatenate[_Handle, _Parameters], _Result],
) -> Callable[Concatenate[_Handle, _Parameters], _Result]:
    """A decorator for a handle's methods that read what a run leaves in its folder: `refresh` comes first.

    Methods that read the record need none of it, for `paceline.runs.read` asks the engine by itself.
    """

    @functools.wraps(method)
    def read_what_is_there_now(handle: _Handle, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        refresh(handle.folder)
        return method(handle, *args, **kwargs)

    return read_what_is_there_now


def is_copy(folder: RunFolder) -> bool:
    """True if the run's folder here is a copy of one elsewhere, which is brought up to date by who reads the run."""
    return bool(engine(folder).get("mirrored"))


def cancel(folder: RunFolder) -> None:
    """Tell the engine that the run is to end.

    Raises:
        TargetError: it can't be told.
    """
    # Of another member's run the supervisor finds the request in its folder.
    if _is_mine(folder):
        teller(folder).cancel(folder, store.stored(folder))


def write_off(folder: RunFolder, by: str) -> RunRecord:
    """Write down as Canceled a run whose engine can't be asked any more, and return its record.

    Raises:
        RunStateError: The run is another user's, or another process looks after it.
    """
    store.check_own(folder, "cancel")
    fd = locks.take(folder.lock)
    if fd is None:
        raise RunStateError(
            f"run {folder.run_id} is being looked after by another process. Try again when that has ended."
        )
    try:
        record = store.stored(folder)
        if record.is_terminal:
            return record
        status, changes = _end(record, JobStatus(state=GONE, cause="canceled", by=by))
        record = store.change(folder, record, status, **changes)
        folder.gone.unlink(missing_ok=True)
        work_dir.clean(folder)
        return record
    finally:
        os.close(fd)


def _gone(folder: RunFolder, record: RunRecord, found: JobStatus, goes_on: GoesOn | None) -> RunRecord:
    try:
        # By a file's time, not this process's clock: each reader starts anew, and they count from the first who has seen it.
        since = folder.gone.stat().st_mtime
    except OSError:
        with contextlib.suppress(OSError):
            folder.gone.touch()
        # For this reader the time begins now; where the file could not be made, on a full disk, for the next one as well.
        since = time.time()
    asked = read_json(folder.cancel_request) or {} if folder.cancel_request.exists() else None
    # An engine that names no cause has most likely done what was asked of it; a cause that it names stays.
    if asked is not None and found.cause in ("canceled", "engine"):
        found = dataclasses.replace(found, cause="canceled", by=asked.get("by") or found.by)
    # Of a job that was canceled in the queue there is no supervisor that could still write.
    never_started = asked is not None and not record.attempts
    if time.time() - since < _GRACE_S and not never_started:
        return store.shown(folder, record)
    fd = locks.take(folder.lock) if os.access(folder.path, os.W_OK) else None
    if fd is None:
        # Another reader writes it.
        if goes_on:
            return store.shown(folder, record)
        status, changes = _end(record, found)
        return dataclasses.replace(record, status=status, **changes)
    try:
        record = store.stored(folder)
        if record.is_terminal:
            return record
        if goes_on is not None and (after := goes_on(folder, record, found)) is not None:
            folder.gone.unlink(missing_ok=True)
            return after
        # Under the lock, and with the record as it is now: the supervisor's own last word, if there is one, has been seen.
        status, changes = _end(record, found)
        record = store.change(folder, record, status, **changes)
        folder.gone.unlink(missing_ok=True)
        work_dir.clean(folder)
        return record
    finally:
        os.close(fd)


def _end(record: RunRecord, found: JobStatus) -> tuple[str, dict[str, Any]]:
    """The state of a run whose job has ended without a word of its supervisor's, and what its record is to say beside that."""
    now = utc_now()
    if found.cause == "canceled":
        by = {"exit_code": EXIT_CANCELED, "canceled_by": found.by or "the engine", "waiting_for": None}
        return states.CANCELED, store.end_changes(record, found.cause, now) | by
    report = FailureReport(
        cause=found.cause,
        message=found.message or f"The run's job ended while the run was {record.status}.",
        exit_code={"time_limit": EXIT_TIME_LIMIT, "preempted": EXIT_PREEMPTED}.get(found.cause, 1),
        attempt=len(record.attempts) or None,
        see=logs_command(record.run_id),
    )
    return states.FAILED, store.failure_changes(record, report, now) | {"waiting_for": None}


def _is_mine(folder: RunFolder) -> bool:
    """Return whether this user wrote the settings by which the run's engine is asked: they can name programs, as options of ssh.

    A run of an older version has none, and uses the workspace's target.
    """
    return store.is_mine(folder.target if folder.target.exists() else folder.record)


def teller(folder: RunFolder) -> Teller:
    # Handed down: `targets` stands above `runs`, and only the run's folder says which target it is.
    target_of_run = cast("Callable[[Path], Teller]", from_above("target_of_run"))
    return target_of_run(folder.path)


def channel(folder: RunFolder) -> Channel | None:
    """Return the channel of the run's target, as `paceline.runs.read.channel`."""
    if not _is_mine(folder):
        raise RunStateError(f"run {folder.run_id} was submitted by another user, who alone can run commands beside it.")
    return teller(folder).channel(folder)


def engine(folder: RunFolder) -> dict[str, Any]:
    """The notes on the run's job: "engine", "job_id" and what else the target wants to know."""
    return dict(read_json(folder.engine) or {})


class ExecRequest(TypedDict, total=False):
    """A request to a run's supervisor: a command beside a rank's worker, or the workers' stacks, or a profile."""

    argv: list[str]
    rank: int
    #: Rows and columns, or None for pipes.
    terminal: tuple[int, int] | None
    term: str | None
    stacks: dict[str, bool]
    profile: dict[str, float]


class ExecMessage(TypedDict, total=False):
    """A message to or from a command: one of these keys. Bytes are base64."""

    data: str
    end: bool
    size: list[int]
    #: How many bytes of the output the client has read.
    read: int
    gone: bool
    out: str
    err: str
    exit: int
    error: str


class Channel(Protocol):
    """A channel to a run's supervisor for one command."""

    #: Whether the command was ended, so that no message can follow.
    is_over: bool

    def begin(self, request: ExecRequest) -> None:
        """Send the request that starts the command."""

    def send(self, message: ExecMessage) -> None:
        """Send one message."""

    def receive(self) -> list[ExecMessage]:
        """Return the messages since the last call, without blocking: "out", "err", "exit" or "error".

        Call it at least once a second: it is the client's sign of life.

        Raises:
            TargetError: The channel is closed.
        """

    def close(self) -> None:
        """End the command, if it still runs, and remove everything."""
