"""Status of runs whose supervisor is inside an engine's job on another machine.

    engine.json     {"engine": "slurm", "job_id": "123"}, written by the submitting program before and after it submits the job;
                    "mirrored": true if this folder is only a copy of the folder that the job uses
    state.json      written by the supervisor, once the engine has started the job
    gone            an empty file, created when the engine no longer knew the job although the record was not final

File locks do not work on all shared file systems. So a reader of such a record queries the engine through the run's
target. Targets cache the engine's answers for a few seconds, for all runs together.
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
from paceline.runs.folder import RunFolder, has_own_record
from paceline.runs.record import RunRecord, utc_now
from paceline.system import locks
from paceline.system.files import is_mine, read_json, write_json
from paceline.system.lazy_import import from_above

#: After a job's end wait this many seconds for the final record, because shared file systems show files after a delay.
_GRACE_S = 10.0

QUEUED, RUNNING, GONE, UNREACHABLE = "queued", "running", "gone", "unreachable"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus:
    """An engine's (such as Slurm's) report on a run's job.

    state: "queued", "running", "gone" (ended or unknown) or "unreachable" (the engine does not answer).
    message: why the job is queued, how it ended, or why the engine does not answer.
    cause: if the job is gone, "cancel" or a key of `paceline.runs.failure.CAUSES`. by: the user that canceled it.
    """

    state: str
    message: str = ""
    cause: str = "engine"
    by: str | None = None


class Teller(Protocol):
    """A target's methods that query its engine, such as Slurm, about a run."""

    def look(self, folder: RunFolder, record: RunRecord) -> JobStatus:
        """Return the engine's recent report on the run, and fetch the run's new files."""

    def cancel(self, folder: RunFolder, record: RunRecord) -> None:
        """Cancel the run's job in the engine. The supervisor reads `cancel.json` too."""

    def channel(self, folder: RunFolder) -> Channel | None:
        """Return a channel to the run's supervisor; None if the supervisor shares this folder."""

    def start_controller(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """Submit the process that controls a sweep, as a job."""


#: A callback for a run whose job is gone: (record, engine's report) -> the new record if the run continues, else None.
GoesOn: TypeAlias = "Callable[[RunFolder, RunRecord, JobStatus], RunRecord | None]"


def read(folder: RunFolder, record: RunRecord, goes_on: GoesOn | None = None) -> RunRecord:
    """Return the record, updated by the engine's report on the run's job.

    If the job is gone, record that the run has ended.

    goes_on: Called before the end is recorded, under the run's lock. If the call returns a record, the run continues.
    """
    if not _is_mine(folder):
        # Only the submitting user's processes query the engine. Other users see the supervisor's record.
        return store.shown(folder, record)
    try:
        found = teller(folder).look(folder, record)
    # Catch PacelineError before OSError, because the error for an engine that does not answer belongs to both classes.
    except PacelineError as error:
        found = JobStatus(state=UNREACHABLE, message=str(error))
    except OSError as error:  # this machine has an error, such as a full disk
        found = JobStatus(state=UNREACHABLE, message=f"{error.filename or folder.path}: {error.strerror or error}")
    record = store.stored(folder)  # the record may have changed while the engine answered
    if record.is_terminal:
        return record
    if found.state != GONE:
        with contextlib.suppress(OSError):
            # The engine knows the job again, perhaps after its restart. If it loses the job later, wait again then.
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
    """Fetch a run's new metrics and files, if its local folder is a copy.

    Call `refresh` before reading these files. The call is quick, because targets query a remote machine at most about
    once a second. If files cannot be fetched, they keep their old content.
    """
    # A process of the run itself works in the original folder, which is always up to date.
    if (
        not is_copy(folder)
        or os.environ.get("PACELINE_RUN_ID") == folder.run_id
        or folder.path.parents[1] in store.only_shown
    ):
        return
    with contextlib.suppress(RunNotFoundError, OSError):
        record = store.stored(folder)
        if not record.is_terminal:  # the final record arrives last, so no file follows it
            read(folder, record)


class HasFolder(Protocol):
    """An object with a run's folder, such as `Run`."""

    @property
    def folder(self) -> RunFolder: ...


_Handle = TypeVar("_Handle", bound=HasFolder)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def reads(
    method: Callable[Concatenate[_Handle, _Parameters], _Result],
) -> Callable[Concatenate[_Handle, _Parameters], _Result]:
    """Decorate a method that reads a run's files, so that `refresh` fetches them first.

    Methods that read only the record do not need this decorator, because `paceline.runs.read` updates the record.
    """

    @functools.wraps(method)
    def read_what_is_there_now(handle: _Handle, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        refresh(handle.folder)
        return method(handle, *args, **kwargs)

    return read_what_is_there_now


def is_copy(folder: RunFolder) -> bool:
    """Return whether the run's local folder is a copy, updated by each reader."""
    return bool(engine(folder).get("mirrored"))


def cancel(folder: RunFolder) -> None:
    """Ask the engine to end a run of this user; ignore another user's run.

    Raises:
        TargetError: The engine cannot be reached.
    """
    # Ask the engine to cancel only this user's runs. If the run belongs to another user, its supervisor reads the request file.
    if _is_mine(folder):
        teller(folder).cancel(folder, store.stored(folder))


def write_off(folder: RunFolder, by: str) -> RunRecord:
    """Record a run as Canceled while its engine does not answer. Return the record.

    Raises:
        RunStateError: The run belongs to another user, or another process owns it.
    """
    store.check_own(folder, "cancel")
    fd = locks.take(folder.lock)
    if fd is None:
        raise RunStateError(f"another process works on run {folder.run_id}. Try again when it has ended.")
    try:
        record = store.stored(folder)
        if record.is_terminal:
            return record
        locks.claim(fd)
        status, changes = _end(record, JobStatus(state=GONE, cause="cancel", by=by))
        record = store.change(folder, record, status, **changes)
        folder.gone.unlink(missing_ok=True)
        work_dir.clean(folder)
        return record
    finally:
        os.close(fd)


def _gone(folder: RunFolder, record: RunRecord, found: JobStatus, goes_on: GoesOn | None) -> RunRecord:
    try:
        # All readers wait from the mtime of the file `gone`, which the first reader who noticed the loss of the job created.
        since = folder.gone.stat().st_mtime
    except OSError:
        with contextlib.suppress(OSError):
            folder.gone.touch()
        # Begin to wait for the final record now. If `gone` can't be written, each reader begins at its first call.
        since = time.time()
    asked = read_json(folder.cancel_request) or {} if folder.cancel_request.exists() else None
    # If the engine reports no cause, but a user has requested the run's end, then this request most likely ended the job.
    if asked is not None and found.cause in ("cancel", "engine"):
        found = dataclasses.replace(found, cause="cancel", by=asked.get("by") or found.by)
    # If no attempt has begun, no supervisor exists that could still write the final record, so don't wait for it.
    never_started = asked is not None and not record.attempts
    if time.time() - since < _GRACE_S and not never_started:
        return store.shown(folder, record)
    may_write = os.access(folder.path, os.W_OK)
    fd = locks.take(folder.lock) if may_write else None
    if fd is None:
        # The lock's holder is a reader that writes the run's end, or the supervisor if the engine's report is wrong.
        if goes_on or may_write:
            return store.shown(folder, record)
        status, changes = _end(record, found)
        return dataclasses.replace(record, status=status, **changes)
    try:
        record = store.stored(folder)
        if record.is_terminal:
            return record
        locks.claim(fd)
        if goes_on is not None and (after := goes_on(folder, record, found)) is not None:
            folder.gone.unlink(missing_ok=True)
            return after
        if not is_copy(folder):
            store.remove_passing(folder)
            folder.closing.unlink(missing_ok=True)  # left by the supervisor's parent process if it ended early
        # Use the record that was read under the lock, because it has the supervisor's last update.
        status, changes = _end(record, found)
        record = store.change(folder, record, status, **changes)
        folder.gone.unlink(missing_ok=True)
        work_dir.clean(folder)
        return record
    finally:
        os.close(fd)


def _end(record: RunRecord, found: JobStatus) -> tuple[str, dict[str, Any]]:
    now = utc_now()
    if found.cause == "cancel":
        by = {"exit_code": EXIT_CANCELED, "canceled_by": found.by or "the engine"}
        return states.CANCELED, store.end_changes(record, found.cause, now) | by
    report = FailureReport(
        cause=found.cause,
        message=found.message or f"The run's job ended while the run was {record.status}.",
        exit_code={"time_limit": EXIT_TIME_LIMIT, "preempted": EXIT_PREEMPTED}.get(found.cause, 1),
        attempt=len(record.attempts) or None,
        see=logs_command(record.run_id),
    )
    return states.FAILED, store.failure_changes(record, report, now)


def _is_mine(folder: RunFolder) -> bool:
    """Return whether this user wrote the run's target settings.

    Another user's settings could make ssh start programs. If a run has no settings, check who wrote the record.
    """
    return is_mine(folder.target) if folder.target.exists() else has_own_record(folder)


def teller(folder: RunFolder) -> Teller:
    # Look up the function by its registered name: it is in `targets`, a higher layer, which `runs` must not import.
    target_of_run = cast("Callable[[Path], Teller]", from_above("target_of_run"))
    return target_of_run(folder.path)


def channel(folder: RunFolder) -> Channel | None:
    """Return a channel to the run's supervisor; None if it shares this folder."""
    if not _is_mine(folder):
        raise RunStateError(f"run {folder.run_id} was submitted by another user, who alone can run commands beside it.")
    return teller(folder).channel(folder)


def engine(folder: RunFolder) -> dict[str, Any]:
    """Return the content of `engine.json`: "engine", "job_id" and keys that the target adds."""
    return dict(read_json(folder.engine) or {})


def note_engine(folder: RunFolder, kind: str, **values: Any) -> None:
    """Add values and the target's `kind` to a run's `engine.json`."""
    write_json(folder.engine, {**engine(folder), "engine": kind, **values}, sync=True)


class ExecRequest(TypedDict, total=False):
    """A request for a command, stack dump or profile beside a worker."""

    argv: list[str]
    rank: int
    #: Rows and columns of the client's terminal, or None if the client uses pipes.
    terminal: tuple[int, int] | None
    term: str | None
    #: For a tunnel: the node's port to which it leads. It replaces the user's command `argv` (`paceline.runs.tunnel`).
    relay: int
    stacks: dict[str, bool]
    profile: dict[str, float]


class ExecMessage(TypedDict, total=False):
    """A message between `paceline exec` and its command, with bytes in base64."""

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
    """A channel to a run's supervisor for one command of `paceline exec`."""

    #: Whether the command has ended, so that it sends no further message.
    is_over: bool

    def begin(self, request: ExecRequest) -> None:
        """Send the request that starts the command."""

    def send(self, message: ExecMessage) -> None:
        """Send the command one message, such as input."""

    def receive(self) -> list[ExecMessage]:
        """Return the new messages ("out", "err", "exit" or "error"), without blocking.

        Call `receive` at least once a second. The supervisor ends the command of a client that stays silent.

        Raises:
            TargetError: The channel is closed.
        """

    def close(self) -> None:
        """End the command if it runs, and remove the channel's files."""
