"""Runs on disk: make one, find one, write its record, and set right the record of one whose supervisor is gone.

`run.json` has one writer at a time: the holder of the run's lock. Whoever reads a record that is not final asks
whether the lock is held (`paceline.runs.read`); where it is not, nobody looks after the run, and the reader takes the lock,
ends what is left of it and writes down that it failed and why. So a run whose supervisor is gone is never shown as Running,
whether the supervisor was killed, the machine restarted or the submitting program died half-way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shlex
import shutil
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import EngineError, FileNameError, LauncherError, RunNotFoundError, RunStateError, WorkspaceError
from paceline.job.job import Job
from paceline.runs import states, tags_and_properties
from paceline.runs.failure import CAUSES, FailureReport, logs_command
from paceline.runs.folder import RunFolder
from paceline.runs.ids import age_key, check_run_id, take_name
from paceline.runs.record import RunRecord, utc_now
from paceline.system import locks, processes
from paceline.system.files import OWNED, PRIVATE, append_line, copy_tree, read_json, write_json
from paceline.system.names import some

_BALLAST_BYTES = 1 << 16

#: Workspaces that came from elsewhere. This process shows what is in them, and starts, asks and writes nothing.
only_shown: set[Path] = set()


def create(
    runs_dir: Path, record: RunRecord, secrets: Mapping[str, str] | None = None, checkpoints: Path | None = None
) -> int:
    """Make the folder of a new run and write its first record; the open file that holds its lock.

    secrets: the values of its job's secrets. checkpoints: a folder whose copy the run finds as its own checkpoints.
    The folder appears under its own name only once it is complete, so no reader meets half a run.

    Raises:
        WorkspaceError: the workspace can't be written to, or its disk is full; the checkpoints can't be copied.
    """
    folder = RunFolder(runs_dir / check_run_id(record.run_id))
    # Lists pass over a name that begins with a dot, and `removal.sweep` finds it if this process is killed here.
    hidden = RunFolder(runs_dir / f".new-{record.run_id}")
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        hidden.path.mkdir()
        fd = -1
        try:
            # The lock is taken while the folder is hidden: under its own name there is no moment at which nobody looks after
            # the run.
            fd = _fill(hidden, record, secrets or {}, checkpoints)
            # It fails where there is a folder with something in it: of two runs of one id the second stops here at the latest.
            os.rename(hidden.path, folder.path)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            shutil.rmtree(hidden.path, ignore_errors=True)
            raise
    except OSError as error:
        raise WorkspaceError(
            f"the run can't be written to {str(runs_dir)!r}: {error.strerror or error}. "
            "Free some space or name another workspace (PACELINE_WORKSPACE)."
        ) from error
    return fd


def _fill(folder: RunFolder, record: RunRecord, secrets: Mapping[str, str], checkpoints: Path | None) -> int:
    for part in (folder.logs, folder.outputs, folder.metrics, folder.checkpoints):
        part.mkdir()
    if checkpoints is not None:
        try:
            copy_tree(checkpoints, folder.checkpoints)
        except OSError as error:
            raise WorkspaceError(
                f"the checkpoints in {str(checkpoints)!r} can't be copied: {error}. See that they are there, and free some space."
            ) from error
    # Space for the last records, taken while there is some.
    folder.ballast.write_bytes(b"\0" * _BALLAST_BYTES)
    if secrets:
        write_json(folder.secrets, dict(secrets), mode=PRIVATE)
    _write(folder, record)
    append_line(folder.events, {"time_utc": record.created_utc, "status": record.status})
    # Trials, steps and other children are known by their parent and their number.
    if record.parent_run_id is None:
        name = take_name(folder.path.parents[1], record.experiment, record.run_id)
        append_line(folder.notes, {"drawn_name": name})
    fd = locks.take(folder.lock)
    assert fd is not None, "nobody else knows of this file"
    return fd


def owner() -> dict[str, Any]:
    """The owner of a run, for its record: this process."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": processes.boot_id()}


def write(folder: RunFolder, record: RunRecord) -> None:
    """Replace the record. For the holder of the lock alone.

    On a full disk the ballast makes room for the last records: by then no worker is left that could fill it again.
    A state on the way there is not worth the run: readers keep seeing the one before.
    """
    try:
        # Only the end has to survive a power cut. After one before the end no worker is left, and readers see that nobody looks
        # after the run.
        _write(folder, record, sync=record.is_terminal)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        if record.is_terminal or record.status == states.FINALIZING:
            if not folder.ballast.exists():
                raise
            folder.ballast.unlink()
            _write(folder, record)


def _write(folder: RunFolder, record: RunRecord, *, sync: bool = False) -> None:
    data = record.to_json()
    write_json(folder.record, data, sync=sync, mode=record_mode(data))


def record_mode(record: Mapping[str, Any]) -> int:
    """The mode of a record's file: what a job's recorded variables hold is for its user alone.

    Only its owner may write to it: by its owner it is known who wrote it (`is_mine`).
    """
    jobs = [record.get("job"), *(step["job"] for step in (record.get("pipeline") or {}).get("steps") or ())]
    secret = any(job and (job.get("environment_variables") or job.get("secrets")) for job in jobs)
    return PRIVATE if secret else OWNED


def change(folder: RunFolder, record: RunRecord, status: str, **changes: Any) -> RunRecord:
    """The record in its next state, written, with the change noted in `events.jsonl`.

    Raises:
        RunStateError: the run has ended already.
    """
    if record.is_terminal:
        raise RunStateError(f"run {record.run_id} is {record.status}; it can't become {status}.")
    if status == states.CANCELED and (failed := failed_by_hand(folder)) is not None:
        status, changes = states.FAILED, {**changes, **failed}
    record = dataclasses.replace(record, status=status, **changes)
    event: dict[str, Any] = {"time_utc": utc_now(), "status": status}
    if record.failure is not None:
        event["message"] = record.failure.message
    with contextlib.suppress(OSError):
        # The state counts, not the note of it: a full disk must not keep the record from being written.
        append_line(folder.events, event)
    if record.is_terminal:
        # First: were this process killed in between, whoever sets the run right would come here again.
        folder.secrets.unlink(missing_ok=True)
    write(folder, record)
    if record.is_terminal:
        with contextlib.suppress(OSError):
            folder.ballast.unlink()
    return record


def failed_by_hand(folder: RunFolder) -> dict[str, Any] | None:
    """What the record of a run says whose end was asked for by `Run.fail`; None where it was asked for by a cancel, or not."""
    request = read_json(folder.cancel_request) or {}
    if request.get("fail") is None:
        return None
    return {"failure": FailureReport(cause="user", message=str(request["fail"])), "exit_code": 1, "canceled_by": None}


def find(runs_dir: Path, run_id: str) -> RunFolder:
    """Return the folder of a run.

    Args:
        run_id: The run's id, or the beginning of it that no other run has, or its name. A sweep's trials, whose ids begin with
            its own, do not count beside it.

    Raises:
        FileNameError: `run_id` has not the form of an id, and no run has this name.
        RunNotFoundError: There is no such run, or there are several.
    """
    try:
        folder = RunFolder(runs_dir / check_run_id(run_id))
    except FileNameError:
        if found := _named(runs_dir, run_id):
            return found
        raise
    # A whole id is found without a look at all the others.
    if folder.record.exists():
        return folder
    matches = [name for name in ids(runs_dir) if name.startswith(run_id)]
    # Sorted by age, a sweep comes after its trials.
    if matches and all(name == matches[-1] or name.startswith(f"{matches[-1]}_") for name in matches):
        return RunFolder(runs_dir / matches[-1])
    if matches:
        shown = ", ".join(matches[:5])
        raise RunNotFoundError(f"{len(matches)} runs begin with {run_id!r}: {shown}. Give more of the id.")
    if found := _named(runs_dir, run_id):
        return found
    raise RunNotFoundError(f"no run {run_id!r} in {str(runs_dir.parent)!r}. `paceline list` shows the runs there are.")


def _named(runs_dir: Path, name: object) -> RunFolder | None:
    """Return the one run of this name; None where there is none.

    Raises:
        RunNotFoundError: Several have it.
    """
    folders = (RunFolder(runs_dir / run_id) for run_id in ids(runs_dir))
    found = [folder for folder in folders if tags_and_properties.read(folder.notes).name == name]
    if len(found) > 1:
        shown = ", ".join(folder.run_id for folder in found[:5])
        raise RunNotFoundError(f"{len(found)} runs are called {name!r}: {shown}. Give an id.")
    return found[0] if found else None


def ids(runs_dir: Path) -> list[str]:
    """The ids of all runs, newest first."""
    try:
        # With a dot in front are folders that are being made or removed.
        names = [name for name in os.listdir(runs_dir) if not name.startswith(".")]
    except FileNotFoundError:
        return []
    return sorted(names, key=age_key, reverse=True)


def shown(folder: RunFolder, record: RunRecord) -> RunRecord:
    """A live run's record as readers see it: CancelRequested once that is asked for."""
    if not record.is_terminal and record.status != states.FINALIZING and folder.cancel_request.exists():
        return dataclasses.replace(record, status=states.CANCEL_REQUESTED)
    return record


def from_elsewhere(workspace_dir: Path) -> str:
    """Return why nothing in a workspace of `only_shown` goes on."""
    return f"you have not made its workspace on this machine; to let it go on: paceline trust {shlex.quote(str(workspace_dir))}"


def deserted_report(record: RunRecord) -> FailureReport:
    """The report on why a run that nobody looks after has failed."""
    if record.kind == "interactive":
        cause, message = "not_completed", CAUSES["not_completed"]
    # Another machine's boot id is another one anyway; on this one it tells of a restart.
    elif record.owner.get("boot_id") not in ("", None, processes.boot_id()) and was_here(record):
        cause, message = "reboot", f"the machine was restarted while the run was {record.status}"
    elif record.status == states.NOT_STARTED:
        cause, message = "not_started", CAUSES["not_started"]
    else:
        cause = "supervisor"
        message = f"the run's supervisor (pid {record.owner.get('pid')}) was killed while the run was {record.status}"
    left = ""
    if record.kind == "script" and record.target not in (None, "local") and record.attempts:
        left = (
            f" Files that were not here yet may lie on {some(record.attempts[-1].nodes, 3)}: "
            f"`paceline prune --compute {record.target}` brings them home."
        )
    return FailureReport(
        cause=cause,
        message=f"{message[0].upper()}{message[1:]}.{left}",
        attempt=len(record.attempts) or None,
        see=logs_command(record.run_id) if record.kind == "script" else None,
    )


def mark_closing(folder: RunFolder) -> None:
    """Let readers know, while the rest is being ended, that the run is no longer looked after."""
    with contextlib.suppress(OSError):
        folder.closing.touch()


def deserted(record: RunRecord) -> RunRecord:
    """The record that a run that nobody looks after will have, for those who read it before that is written."""
    return dataclasses.replace(
        record, status=states.FAILED, **failure_changes(record, deserted_report(record), utc_now())
    )


def failure_changes(record: RunRecord, report: FailureReport, ended_utc: str) -> dict[str, Any]:
    """What the record of a run that has failed so is to say, beside its state."""
    return {**end_changes(record, report.cause, ended_utc), "failure": report, "exit_code": report.exit_code}


def end_changes(record: RunRecord, cause: str, ended_utc: str) -> dict[str, Any]:
    """What the record of a run is to say of its end, and of the end of an attempt that was under way."""
    attempts = record.attempts
    if attempts and attempts[-1].ended_utc is None:
        attempts = (*attempts[:-1], dataclasses.replace(attempts[-1], ended_utc=ended_utc, cause=cause))
    return {"ended_utc": ended_utc, "attempts": attempts}


def close_deserted(
    folder: RunFolder, record: RunRecord, report: FailureReport, ended_utc: str | None = None
) -> RunRecord:
    """Write the end of a run whose owner is gone, and remove what it left. For the holder of the lock. ended_utc: now."""
    remove_scratch(folder, record)
    for path in folder.passing():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    changes = failure_changes(record, report, ended_utc or utc_now())
    record = change(folder, record, states.FAILED, **changes, scratch_dir=None)
    # Last: as long as it is there, readers say what the record will say.
    folder.closing.unlink(missing_ok=True)
    return record


def remove_scratch(folder: RunFolder, record: RunRecord) -> None:
    """Remove the run's scratch folder, if it is one that Paceline makes for this run, and this user's.

    The record names it, and others may have written the record: any other path stays as it is.
    """
    path = Path(record.scratch_dir or "")
    if path.name != folder.scratch.name:
        return
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        # As /tmp and /dev/shm are: what lies there is temporary. Another process may have had another TMPDIR.
        is_temporary = path.parent == folder.scratch.parent or os.lstat(path.parent).st_mode & stat.S_ISVTX
        if is_temporary and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)


def set_right(folder: RunFolder) -> RunRecord:
    """End what is left of a run that nobody looks after any more, and write down that it failed; its record then."""
    fd = locks.take(folder.lock) if os.access(folder.path, os.W_OK) else None
    if fd is None:
        # Another reader is at it, or the folder is not ours to write: say what is true all the same.
        record = stored(folder)
        if record.is_terminal:
            return record
        return deserted(record)
    try:
        record = stored(folder)
        if record.is_terminal:
            return record
        # Read again under the lock, for another reader or the owner itself may have written the end since. Who holds the lock
        # now is the record's one writer.
        report = deserted_report(record)
        mark_closing(folder)
        if record.kind == "script":
            # Before the end is written: of a run that has ended nothing may go on. By their environment, for the supervisor
            # whose descendants they were is gone.
            processes.kill_with_variable("PACELINE_RUN_DIR", str(folder.path))
            processes.kill_writers(str(folder.path / "attempts"))  # what has dropped its environment, too
            remove_containers(record.job, record.run_id)
        return close_deserted(folder, record, report)
    finally:
        os.close(fd)


def check_own(folder: RunFolder, verb: str) -> None:
    """Refuse a run that this user may not change.

    Raises:
        RunStateError: Its folder can't be written to; with whom to ask.
    """
    if folder.path.is_dir() and not os.access(folder.path, os.W_OK):
        raise RunStateError(
            f"run {folder.run_id} belongs to {stored(folder).submitted_by or 'another user'}, and its folder, "
            f"{str(folder.path)!r}, can't be written to. Ask them to {verb} it."
        )


def stored(folder: RunFolder) -> RunRecord:
    """The record as it is written, whoever looks after the run or does not: for its owner."""
    data = read_json(folder.record)
    if not isinstance(data, dict):
        raise RunNotFoundError(f"no readable record in {str(folder.path)!r}. `paceline list` shows the runs there are.")
    try:
        return RunRecord.from_json(data)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RunNotFoundError(
            f"no readable record in {str(folder.path)!r}: {error}. Was it written by a newer Paceline?"
        ) from error


def is_mine(path: Path) -> bool:
    """Return whether this user or root has written a file that only its owner writes to (`OWNED`).

    In a workspace of a group each member can put another file in its place, which is the member's then.
    """
    try:
        return os.lstat(path).st_uid in (os.geteuid(), 0)
    except OSError:
        return False


def was_here(record: RunRecord) -> bool:
    """True if the run's owner was a process of this machine."""
    return record.owner.get("host") == socket.gethostname()


def remove_containers(job: Job | None, run_id: str, *, all_ended: bool = False) -> None:
    """End what this machine's engine still has of the run; nothing for a run without an image. Never raises.

    all_ended: no client was killed, so that none has left a container in the making.
    """
    if job is None or job.environment.docker_image is None:
        return
    from paceline.containers import SETTLE_S, find_engine, remove

    try:
        remove(find_engine(to_start=False), run_id, settle_s=0.0 if all_ended else SETTLE_S)
    except (LauncherError, EngineError):
        return  # whoever took the engine away took its containers with it; one that is stuck ends none
