"""Create and find runs on disk, write their records, and close abandoned runs.

`job.json` is written once, when the run's folder is made, and `state.json` is replaced whole with each change. Only the
process that holds the run's lock writes `state.json`. A reader of a record that is not final checks whether the lock is
held (`paceline.runs.read`). If the lock is free, the run is abandoned: its supervisor or program was killed, or the
machine has restarted. Then the reader takes the lock, ends the remaining processes, and records the failure. So no
abandoned run shows as Running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import EngineError, FileNameError, LauncherError, RunNotFoundError, RunStateError, WorkspaceError
from paceline.job.job import Job
from paceline.runs import states, tags_and_properties
from paceline.runs.failure import CAUSES, FailureReport, logs_command
from paceline.runs.folder import RunFolder
from paceline.runs.ids import age_key, check_run_id, take_name
from paceline.runs.record import Owner, RunRecord, utc_at, utc_now
from paceline.system import files, locks, processes
from paceline.system.files import OWNED, PRIVATE, append_line, copy_tree, read_json, sync_if_possible, write_json
from paceline.system.names import did_you_mean, some

_BALLAST_BYTES = 1 << 16
#: Maximum number of run names and ids that are compared with a misspelled name, to suggest a similar one.
_SEARCHED = 2000

#: Workspaces of other users or machines. This process only shows their runs: it starts nothing and writes nothing in them.
only_shown: set[Path] = set()


def create(
    runs_dir: Path,
    record: RunRecord,
    secrets: Mapping[str, str] | None = None,
    checkpoints: Path | None = None,
    fill: Callable[[RunFolder], None] | None = None,
) -> int:
    """Create a new run's folder with its first record. Return its lock's fd.

    Readers never find an incomplete run: the folder gets its final name once it is complete.

    secrets: Values of the job's secrets by variable.
    checkpoints: Folder that is copied into the run as its own checkpoints.
    fill: Called with the folder before readers can find it, to add files such as an imported run's files.

    Raises:
        WorkspaceError: The workspace cannot be written to, its disk is full, or the checkpoints cannot be copied.
    """
    folder = RunFolder(runs_dir / check_run_id(record.run_id))
    # Create a hidden folder first: lists skip names with a dot, and `removal.sweep` removes the folder after a kill.
    hidden = RunFolder(runs_dir / f".new-{record.run_id}")
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        hidden.path.mkdir()
        fd = -1
        try:
            # Take the lock while the folder is hidden, because a visible run without a lock would look abandoned.
            fd = _fill(hidden, record, secrets or {}, checkpoints)
            if fill is not None:
                fill(hidden)
            # Renaming onto a folder with content fails: if two processes create runs with the same id, the second stops here.
            os.rename(hidden.path, folder.path)
            _submitted(folder, record.job)
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
    # Write a file that only reserves disk space. If the disk is full, its removal makes room for the last records.
    folder.ballast.write_bytes(b"\0" * _BALLAST_BYTES)
    if secrets:
        write_json(folder.secrets, dict(secrets), mode=PRIVATE)
    write_json(folder.job, record.job_json(), mode=record_mode(record))
    replace_state(folder, record)
    append_line(folder.events, {"time_utc": record.created_utc, "status": record.status})
    # Give a name only to a run without a parent. A child run is shown by its parent's id and a number.
    if record.parent_run_id is None:
        name = take_name(folder.path.parents[1], record.experiment, record.run_id)
        append_line(folder.notes, {"drawn_name": name})
    fd = locks.take(folder.lock)
    assert fd is not None, "nobody else knows of this file"
    return fd


def owner() -> Owner:
    """Return this process's pid, host and boot id, for a record."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": processes.boot_id()}


def write(folder: RunFolder, record: RunRecord) -> None:
    """Write `state.json`. The caller holds the run's lock.

    Each run has a placeholder file, which reserves disk space. On a full disk, a final state is written into this file.
    Other states are skipped, so readers still see the previous state.
    """
    try:
        # Sync only the final record: after a power cut a run with any earlier record counts as abandoned in any case.
        if record.is_terminal:
            sync_if_possible(folder.job)
        replace_state(folder, record, sync=record.is_terminal)
    except OSError as error:
        if not files.is_full(error):
            raise
        if record.is_terminal:
            if not folder.ballast.exists():
                raise
            # Write over the blocks of the file, which other processes could take if it was removed first.
            with open(folder.ballast, "r+b") as file:
                file.write(json.dumps(record.state_json()).encode() + b"\n")
                file.truncate()
            os.chmod(folder.ballast, record_mode(record))
            os.replace(folder.ballast, folder.state)


def replace_state(folder: RunFolder, record: RunRecord, *, sync: bool = False) -> None:
    """Write `state.json`. With `sync`, flush it to the disk.

    Raises:
        OSError: The file can't be written; the old file stays.
    """
    write_json(folder.state, record.state_json(), sync=sync, mode=record_mode(record))


def record_mode(record: RunRecord) -> int:
    """Return the file permissions of a record, private if its job has variables or secrets.

    Only the owner can write to these files, so the owner of the files shows who wrote them (`is_mine`).
    """
    steps: Any = (record.pipeline or {}).get("steps") or ()
    secret = any(step["job"].get("environment_variables") or step["job"].get("secrets") for step in steps)
    if record.job is not None:
        secret = secret or bool(record.job.environment_variables or record.job.secrets)
    return PRIVATE if secret else OWNED


def change(folder: RunFolder, record: RunRecord, status: str, *, digest: str | None = "", **changes: Any) -> RunRecord:
    """Change a run's status: write its record and an event. Return the record.

    At the run's end, notifications are sent before the record is written, because a final record never changes and must
    name the failed notifications.

    digest: Text to add to these notifications, such as the results of a sweep; None to send no notifications.

    Raises:
        RunStateError: The run has already ended.
    """
    if record.is_terminal:
        raise RunStateError(f"run {record.run_id} is {record.status}; it can't become {status}.")
    if status == states.CANCELED and (failed := failed_by_hand(folder)) is not None:
        status, changes = states.FAILED, {**changes, **failed}
    record = dataclasses.replace(record, status=status, **changes)
    if record.is_terminal and digest is not None and record.receivers:
        from paceline.runs import notify

        record = dataclasses.replace(record, warnings=(*record.warnings, *notify.tell(folder, record, "end", digest)))
    event: dict[str, Any] = {"time_utc": utc_now(), "status": status}
    if record.failure is not None:
        event["message"] = record.failure.message
    with contextlib.suppress(OSError):
        # The record matters more than this event: on a full disk, continue without the event.
        append_line(folder.events, event)
    if record.is_terminal:
        # Remove the secrets before writing the end. If this process is killed in between, a reader repeats both steps.
        folder.secrets.unlink(missing_ok=True)
    write(folder, record)
    if record.is_terminal:
        with contextlib.suppress(OSError):
            folder.ballast.unlink()
    return record


def failed_by_hand(folder: RunFolder) -> dict[str, Any] | None:
    """Return the record's new fields if `Run.fail` has requested a failure, else None."""
    request = read_json(folder.cancel_request) or {}
    if request.get("fail") is None:
        return None
    return {"failure": FailureReport(cause="user", message=str(request["fail"])), "exit_code": 1, "canceled_by": None}


def find(runs_dir: Path, run_id: str) -> RunFolder:
    """Return the folder of the run with an id or name.

    run_id: The run's id, a unique prefix of it, or the run's name. A sweep's id takes precedence over its trials'
        ids, which begin with the sweep's id.

    Raises:
        FileNameError: `run_id` is neither a valid id nor the name of a run.
        RunNotFoundError: No run matches, or several do.
    """
    try:
        folder = RunFolder(runs_dir / check_run_id(run_id))
    except FileNameError:
        if found := _named(runs_dir, run_id, _names(runs_dir)):
            return found
        raise
    # If `run_id` is a complete id, its folder exists, so the folder with all runs need not be listed.
    if folder.state.exists():
        return folder
    matches = [name for name in ids(runs_dir) if name.startswith(run_id)]
    # `ids` returns the newest id first, so a sweep's id comes after the ids of its trials.
    if matches and all(name == matches[-1] or name.startswith(f"{matches[-1]}_") for name in matches):
        return RunFolder(runs_dir / matches[-1])
    if matches:
        shown = ", ".join(matches[:5])
        raise RunNotFoundError(f"{len(matches)} runs begin with {run_id!r}: {shown}. Give more of the id.")
    names = _names(runs_dir)
    if found := _named(runs_dir, run_id, names):
        return found
    if (runs_dir.parent / "trash" / run_id).is_dir():
        raise RunNotFoundError(f"no run {run_id!r}: it is in the trash. `paceline restore {run_id}` brings it back.")
    meant = did_you_mean(run_id, [*filter(None, names.values()), *names][:_SEARCHED])
    raise RunNotFoundError(f"no run {run_id!r} in {str(runs_dir.parent)!r}.{meant} `paceline list` shows all.")


def _names(runs_dir: Path) -> dict[str, str | None]:
    return {run_id: tags_and_properties.read(RunFolder(runs_dir / run_id).notes).name for run_id in ids(runs_dir)}


def _named(runs_dir: Path, name: object, names: Mapping[str, str | None]) -> RunFolder | None:
    """Return the only run with this name in `names` (id -> name), or None.

    Raises:
        RunNotFoundError: Several runs have this name.
    """
    found = [run_id for run_id, its in names.items() if its == name]
    if len(found) > 1:
        raise RunNotFoundError(f"{len(found)} runs are called {name!r}: {', '.join(found[:5])}. Give an id.")
    return RunFolder(runs_dir / found[0]) if found else None


def ids(runs_dir: Path) -> list[str]:
    """Return the ids of a workspace's runs, newest first."""
    try:
        # Skip names that begin with a dot: Paceline gives such names to folders while it creates or removes them.
        names = [name for name in os.listdir(runs_dir) if not name.startswith(".")]
    except FileNotFoundError:
        return []
    return sorted(names, key=age_key, reverse=True)


def shown(folder: RunFolder, record: RunRecord) -> RunRecord:
    """Return the record, with status CancelRequested if a live run has a cancel request."""
    if not record.is_terminal and record.status != states.FINALIZING and folder.cancel_request.exists():
        return dataclasses.replace(record, status=states.CANCEL_REQUESTED)
    return record


def from_elsewhere(workspace_dir: Path) -> str:
    """Return why an untrusted workspace's runs don't continue, and how to trust it."""
    return f"you have not made its workspace on this machine; to let it go on: paceline trust {shlex.quote(str(workspace_dir))}"


def deserted_report(record: RunRecord) -> FailureReport:
    """Return the failure report of a run whose supervisor is gone."""
    if record.kind == "interactive":
        cause, message = "not_completed", CAUSES["not_completed"]
    # If the boot id has changed and this is the owner's machine, the machine was restarted.
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


def _rank_failure(folder: RunFolder) -> FailureReport | None:
    try:
        return FailureReport.from_json(read_json(folder.rank_failure))
    except (TypeError, ValueError, KeyError, AttributeError):
        return None


def mark_closing(folder: RunFolder) -> None:
    """Mark the run as over, for readers, while its last processes are killed."""
    with contextlib.suppress(OSError):
        # Keep the time of an existing mark: readers have already reported it as the run's end.
        folder.closing.touch(exist_ok=False)


def deserted(folder: RunFolder, record: RunRecord) -> RunRecord:
    """Return a run's record as Failed, since its supervisor is gone; write nothing."""
    report = _rank_failure(folder) or deserted_report(record)
    changes = failure_changes(record, report, _closed_utc(folder))
    return dataclasses.replace(record, status=states.FAILED, **changes, scratch_dir=None)


def _closed_utc(folder: RunFolder) -> str:
    # Use the time of the file `closing`, so that all readers and the final record have the same end of the run.
    with contextlib.suppress(OSError):
        return utc_at(folder.closing.stat().st_mtime)
    return utc_now()


def failure_changes(record: RunRecord, report: FailureReport, ended_utc: str) -> dict[str, Any]:
    """Return the changed fields of a failed run's record, except its status."""
    return {**end_changes(record, report.cause, ended_utc), "failure": report, "exit_code": report.exit_code}


def end_changes(record: RunRecord, cause: str, ended_utc: str) -> dict[str, object]:
    """Return the changed fields of a run's record at its end."""
    attempts = record.attempts
    if attempts and attempts[-1].ended_utc is None:
        attempts = (*attempts[:-1], dataclasses.replace(attempts[-1], ended_utc=ended_utc, cause=cause))
    return {"ended_utc": ended_utc, "attempts": attempts, "waiting_for": None}


def close_deserted(folder: RunFolder, record: RunRecord, report: FailureReport) -> RunRecord:
    """Record the end of a run whose supervisor is gone. The caller holds its lock."""
    remove_scratch(folder, record)
    remove_passing(folder)
    changes = failure_changes(record, report, _closed_utc(folder))
    record = change(folder, record, states.FAILED, **changes, scratch_dir=None)
    # Remove the marker file `closing` last: while it exists, readers of the run report the end that is being written.
    folder.closing.unlink(missing_ok=True)
    return record


def remove_passing(folder: RunFolder) -> None:
    """Remove temporary files that a killed supervisor has left in the run's folder."""
    for path in folder.passing():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def remove_scratch(folder: RunFolder, record: RunRecord) -> None:
    """Remove the run's scratch folder (sockets, shared memory), if Paceline made it.

    Another user may have written the record. So a folder that does not look like a scratch folder of this user stays.
    """
    path = Path(record.scratch_dir or "")
    if path.name != folder.scratch.name:
        return
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        # Accept any sticky folder, such as /tmp: the process that made the scratch folder may have had another TMPDIR.
        is_temporary = path.parent == folder.scratch.parent or os.lstat(path.parent).st_mode & stat.S_ISVTX
        if is_temporary and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)


def set_right(folder: RunFolder) -> RunRecord:
    """End the processes of a run whose supervisor is gone, and record its failure."""
    may_write = os.access(folder.path, os.W_OK)
    if may_write:
        mark_closing(folder)  # mark it before locking: readers that find the lock taken report the mark's time
    fd = locks.take(folder.lock) if may_write else None
    try:
        record = stored(folder)
        if record.is_terminal:
            with contextlib.suppress(OSError):
                folder.closing.unlink(missing_ok=True)  # another reader has closed the run before this one marked it
            return record
        if fd is None:
            # If another reader is closing the run, or this user cannot write to the folder, return the unchanged record.
            return deserted(folder, record)
        locks.claim(fd)  # a supervisor that lives, but whose file system has released its lock, then ends
        # The record was read again under the lock, because another reader or the owner may have written the end meanwhile.
        report = _rank_failure(folder) or deserted_report(record)
        if record.kind == "script":
            # Kill the run's processes before writing its end. An environment variable identifies these processes.
            processes.kill_with_variable("PACELINE_RUN_DIR", str(folder.path))
            processes.kill_writers(str(folder.path / "attempts"))  # processes that write logs but lack the variable
            remove_containers(record.job, record.run_id)
        return close_deserted(folder, record, report)
    finally:
        if fd is not None:
            os.close(fd)


def check_own(folder: RunFolder, verb: str) -> None:
    """Raise an error if this user may not change the run.

    Raises:
        RunStateError: The run's folder cannot be written to. The message says to ask the owner to `verb` the run.
    """
    if folder.path.is_dir() and not os.access(folder.path, os.W_OK):
        raise RunStateError(
            f"run {folder.run_id} belongs to {stored(folder).submitted_by or 'another user'}, and its folder, "
            f"{str(folder.path)!r}, can't be written to. Ask them to {verb} it."
        )


def stored(folder: RunFolder) -> RunRecord:
    """Return the record on disk, which may show a dead run as Running."""
    state = read_json(folder.state)
    try:
        submitted = _submitted(folder) if isinstance(state, dict) and "status" in state else None
        if submitted is not None:
            return submitted.with_state(state)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RunNotFoundError(
            f"no readable record in {str(folder.path)!r}: {error}. Was it written by a newer Paceline?"
        ) from error
    raise RunNotFoundError(f"no readable record in {str(folder.path)!r}. `paceline list` shows the runs there are.")


#: Cache: path of a `job.json` -> (the file's stamp, record without a state). Commands that follow a run often read its record.
_known: dict[str, tuple[tuple[int, ...], RunRecord]] = {}
#: Maximum number of cached records. The page that compares runs shows fewer runs than this at once.
_MOST_KNOWN = 256


def _submitted(folder: RunFolder, job: Job | None = None) -> RunRecord | None:
    """Return the record in `job.json`, validated once per process; None without this file.

    job: The run's job, if the caller has it.
    """
    try:
        found = os.stat(folder.job)
    except OSError:
        return None
    # Compare the file's stamp: Paceline never changes this file, but a user may have replaced it by another file.
    version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    known = _known.get(str(folder.job))
    if known is None or known[0] != version:
        data = read_json(folder.job)
        if not isinstance(data, dict):
            return None
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        if job is None:
            record = RunRecord.from_json(data)
        else:
            # Use the job object of the process that made the run, so that the job is not parsed again.
            record = dataclasses.replace(RunRecord.from_json({**data, "job": None}), job=job)
        known = _known[str(folder.job)] = (version, record)
    return known[1]


def has_ended(folder: RunFolder) -> bool:
    """Return whether the run's state in `state.json` is final."""
    return states.is_final(read_json(folder.state))


def experiment(folder: RunFolder) -> str:
    """Return the run's experiment without validating its job, for workers.

    Raises:
        RunNotFoundError: No record can be read.
    """
    data = read_json(folder.job)
    if not isinstance(data, dict) or "experiment" not in data:
        raise RunNotFoundError(f"no readable record in {str(folder.path)!r}. `paceline list` shows the runs there are.")
    return str(data["experiment"])


def was_here(record: RunRecord) -> bool:
    """Return whether the run's owner was a process of this machine."""
    return record.owner.get("host") == socket.gethostname()


def remove_containers(job: Job | None, run_id: str, *, all_ended: bool = False) -> None:
    """Remove the run's containers, if any, from this machine's engine. Never raises.

    all_ended: Whether all container clients (`docker run`) have ended, so that no container is still being created.
    """
    if job is None or job.environment.docker_image is None:
        return
    from paceline.containers import SETTLE_S, find_engine, remove

    try:
        remove(find_engine(to_start=False), run_id, settle_s=0.0 if all_ended else SETTLE_S)
    except (LauncherError, EngineError):
        return  # no container engine is installed, so no containers exist; or the engine hangs and can't remove any
