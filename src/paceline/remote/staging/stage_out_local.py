"""Store outputs of a run that is supervised elsewhere in folders of the submitting machine.

    there    uploads/<output>/      the output as the workers have left it
             prepared/left.json     names and sizes of its files: {"model": {"a/1.pt": 99}} (`stage_out`)
    here     home.json              from submission {"host": ..., "folders": {"model": inode}}; once all files are
                                    here, also "end", the final record, and
                                    "stored": {"model": {"files": 1, "bytes": 99}}

A run's record arrives after its files. If outputs must be stored, the final record waits in `home.json`, and the run is
Finalizing. The next process that reads the run stores the outputs under the run's lock, then writes the final record.
If that process is killed, the next reader repeats both steps, but skips files that are already stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from paceline.errors import PacelineError, TargetError, TransferError
from paceline.job.data_reference import DataReference
from paceline.remote.replica.apply import Replica, ReplicaError
from paceline.remote.wire import WireError
from paceline.runs import run_data, states, store
from paceline.runs.failure import CAUSES, EXIT_CANCELED, FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.logs import last_lines
from paceline.runs.record import RunRecord, utc_now
from paceline.system import locks
from paceline.system.files import json_lines, read_json, write_json, write_whole

#: Fields of the record that a remote supervisor may set. Other fields name commands to run here, or files to remove.
_TAKEN = (
    *("status", "started_utc", "ended_utc", "waiting_for", "attempts", "size", "exit_code", "failure", "canceled_by"),
    *("warnings", "hang", "left_out", "left_out_count"),
)


def expect(folder: RunFolder, outputs: Sequence[str]) -> None:
    """Check that this machine can store a run's outputs, and create `home.json`.

    The file `home.json` lists the outputs' folders. Call this before the run is sent. Do nothing without outputs.
    """
    if not outputs:
        return
    from paceline.data.transfer.upload import check_upload

    folders = {}
    for reference in _outputs(store.stored(folder), outputs):
        check_upload(reference, folder.path.parent.parent)
        folders[reference.name] = _inode(reference, folder)
    write_json(folder.home, {"host": socket.gethostname(), "folders": folders})


def take_record(folder: RunFolder, data: bytes) -> None:
    """Store the state of a run that its supervisor has sent.

    Store only fields that a supervisor may change. While outputs of an ended run are not stored yet, write the final
    state to the file `home.json`, and let the run's record say Finalizing.

    Raises:
        ReplicaError: The data is not a run's state, or has a value that no supervisor writes.
    """
    record, told = _checked(folder, data), read_json(folder.home)
    waits = told is not None and bool(read_json(folder.left))
    # A canceled run stores no outputs.
    if not waits or record.status not in (states.COMPLETED, states.FAILED):
        if record.status == states.COMPLETED:
            record = dataclasses.replace(record, warnings=(*record.warnings, *_registered(folder, record)))
        store.replace_state(folder, record)
        if record.is_terminal:
            folder.home.unlink(missing_ok=True)
        return
    # Remove the event of the final state, because `_end` writes it again when the outputs are stored.
    events = [event for event in json_lines(folder.events) if event.get("status") not in states.TERMINAL]
    write_whole(folder.events, "".join(json.dumps(event) + "\n" for event in events))
    write_json(folder.home, {**told, "end": record.state_json()}, sync=True, mode=store.record_mode(record))
    store.write(folder, _finalizing(record))


def _checked(folder: RunFolder, data: bytes) -> RunRecord:
    stored = store.stored(folder)
    try:
        found = json.loads(data)
        taken = {name: found[name] for name in _TAKEN if name in found}
        record = stored.with_state(taken)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ReplicaError(f"the run's record is not one that a supervisor writes: {error}") from error
    codes = [record.exit_code, record.failure.exit_code if record.failure else None]
    if record.status not in states.ALL or (record.failure and record.failure.cause not in CAUSES):
        raise ReplicaError(f"status {record.status!r} or its failure's cause in the run's record is invalid for a run")
    if any(code is not None and not 0 <= code <= 255 for code in codes):
        raise ReplicaError(f"exit code {codes} in the run's record is not from 0 to 255")
    return record


def is_over(folder: RunFolder) -> bool:
    """Return whether a run has ended, but its outputs are not yet stored."""
    return "end" in (read_json(folder.home) or {})


#: The local copy of a remote run, and the values of its `mirrored.json`; None if the copy is new enough.
Update: TypeAlias = "tuple[Replica, dict[str, Any]] | None"


@contextlib.contextmanager
def updating(folder: RunFolder, fresh_s: float, what: str) -> Iterator[Update]:
    """Lock a remote run's local copy during a `with` block that updates it.

    Yield None if the copy is complete or new enough. Otherwise yield the copy and values of `mirrored.json`, stored at the end:
    "known" (files that have arrived) and "time" (of the last complete update). After an error, "known" is stored too.

    Args:
        folder: The run's folder on this machine, which is the copy.
        fresh_s: Seconds for which a copy counts as up to date. Another reader may have updated it during the wait for the lock.
        what: The beginning of the message of an error.

    Raises:
        TargetError: The block has applied a forbidden or invalid change.
    """
    path = folder.path / "mirrored.json"
    with locks.locked(folder.path / "mirror.lock"):
        told: dict[str, Any] = read_json(path) or {}
        if abs(time.time() - told.get("time", 0.0)) < fresh_s or has_all(folder):
            yield None
            return
        replica = Replica(folder.path, lambda record: take_record(folder, record), told.get("known"))
        replica.known.pop(folder.state.name, None)  # fetch this file always: its copy here may have changed
        try:
            yield replica, told
            told["time"] = time.time()
        except (ReplicaError, WireError) as error:
            raise TargetError(f"{what}: {error}.") from error
        finally:
            replica.close()
            write_json(path, {**told, "known": replica.known})


def has_all(folder: RunFolder) -> bool:
    """Return whether the run's final record, the last file, has arrived."""
    return is_over(folder) or store.has_ended(folder)


def settle(folder: RunFolder) -> bool:
    """Store a run's outputs, then its final record. Return False without outputs.

    Return True without storing them if another process does this, or if this user may not write the run's folder.
    """
    if not is_over(folder):
        return False
    # A user who can only read the run can't store its outputs. The run's owner stores them later.
    fd = locks.take(folder.lock) if os.access(folder.path, os.W_OK) else None
    if fd is not None:
        try:
            # Check again under the lock, because another process may have stored all outputs meanwhile.
            if is_over(folder):
                _settle(folder, read_json(folder.home))
        finally:
            os.close(fd)
    return True


class _CanceledError(Exception):
    """The error that a run was canceled while its outputs were being stored."""


def _settle(folder: RunFolder, told: dict[str, Any]) -> None:
    record = store.stored(folder)
    if record.is_terminal:
        folder.home.unlink()  # a killed process has written the final record, but has not deleted `home.json`
        return
    left = _outputs(record, read_json(folder.left))
    by = _by_whom(folder, record, told, left)
    now = dataclasses.replace(_finalizing(record.with_state(told["end"])), waiting_for=_text(left, by))
    if now != record:
        store.write(folder, now)
    if by is not None:
        return
    failure, canceled = None, False
    try:
        for reference in left:
            _store(folder, reference, told)
    except _CanceledError:
        canceled = True
        _say(folder, f"canceled while outputs were being stored; what is left of them is in {folder.uploads}")
    except PacelineError as error:
        message = f"{error} The files that are not stored are in {str(folder.uploads)!r}."
        _say(folder, message)
        failure = FailureReport(
            cause="data",
            message=message,
            last_lines=tuple(last_lines(folder.prepare_log(0), 20)),
            see=f"paceline logs {folder.run_id} --prepare",
        )
    if told.get("stored"):
        run_data.note(folder, told["stored"])
    _end(folder, now, record.with_state(told["end"]), failure, canceled=canceled)
    folder.home.unlink()


def _store(folder: RunFolder, reference: DataReference, told: dict[str, Any]) -> None:
    from paceline.data.transfer.upload import upload_output

    path, begun = folder.uploads / reference.name, folder.uploads / f".{reference.name}.begun"
    stored = told.setdefault("stored", {})
    if reference.name not in stored:
        _check_cancel(folder)
        _check_whole(folder, reference)
        uploaded = upload_output(
            reference,
            folder.path,
            workspace_dir=folder.path.parent.parent,
            say=lambda text: _append(folder.prepare_log(0), f"{text}\n"),
            progress=lambda *_: _check_cancel(folder),
            begun=begun,
        )
        stored[reference.name] = {"files": uploaded.files, "bytes": uploaded.bytes}
        # Record each stored output at once, so that it is not stored again if this process is killed.
        write_json(folder.home, told, sync=True)
    shutil.rmtree(path, ignore_errors=True)
    begun.unlink(missing_ok=True)


def _check_whole(folder: RunFolder, reference: DataReference) -> None:
    top, files = folder.uploads / reference.name, read_json(folder.left)[reference.name]
    for path in (folder.uploads, top):
        if path.is_symlink():
            path.unlink()  # remove the link, because Paceline creates no links here
    top.mkdir(parents=True, exist_ok=True)  # an output without files was not sent, so it has no folder
    for path in list(top.rglob("*")):
        if path.is_symlink() or (not path.is_dir() and str(path.relative_to(top)) not in files):
            path.unlink()  # remove a killed reader's incomplete file, or a link: Paceline creates no links here
    missing = [name for name, size in files.items() if not _is_of_size(top / name, size)]
    if missing:
        raise TransferError(
            f"output {reference.name!r}: {len(missing)} of its {len(files)} files have not come back whole, such as "
            f"{min(missing)!r}; none was stored."
        )


def _check_cancel(folder: RunFolder) -> None:
    if folder.cancel_request.exists():
        raise _CanceledError


def _end(folder: RunFolder, now: RunRecord, end: RunRecord, failure: FailureReport | None, *, canceled: bool) -> None:
    changes: dict[str, object] = {"failure": end.failure, "exit_code": end.exit_code, "ended_utc": end.ended_utc}
    status = end.status
    if status == states.COMPLETED and canceled:
        by = str((read_json(folder.cancel_request) or {}).get("by", "unknown"))
        status, changes = states.CANCELED, {"exit_code": EXIT_CANCELED, "canceled_by": by, "ended_utc": utc_now()}
    elif status == states.COMPLETED and failure is not None:
        status = states.FAILED
        changes = {"failure": failure, "exit_code": failure.exit_code, "ended_utc": utc_now()}
    if status == states.COMPLETED and (said := _registered(folder, end)):
        changes["warnings"] = (*now.warnings, *said)
    # The run's own supervisor has already notified the receivers of `end.status`. Notify again only if the status differs.
    digest = None if status == end.status else ""
    store.change(folder, now, status, digest=digest, waiting_for=None, **changes)


def _registered(folder: RunFolder, record: RunRecord) -> list[str]:
    """Register outputs as datasets, where the job requests it. Return error messages."""
    references = record.job.inputs if record.job else ()
    if not any(reference.registered for reference in references) or os.stat(folder.path).st_uid != os.geteuid():
        return []
    from paceline.data.datasets.dataset import register_outputs

    made, said = register_outputs(references, folder.path.parent.parent)
    run_data.note_datasets(folder, made)
    return said


def _by_whom(
    folder: RunFolder, record: RunRecord, told: Mapping[str, Any], left: Sequence[DataReference]
) -> str | None:
    """Return why this user or machine can't store the outputs `left`, or None."""
    if os.stat(folder.path).st_uid != os.geteuid():
        return f"waits for a look at the run by {record.submitted_by or 'the submitting user'}"
    folders = told.get("folders", {})
    if told["host"] != socket.gethostname() and any(
        folders.get(reference.name) is None or _inode(reference, folder) != folders[reference.name]
        for reference in left
    ):
        return f"waits for a look at the run on {told['host']}"
    return None


def _inode(reference: DataReference, folder: RunFolder) -> int | None:
    """Return the inode of an output's folder on this machine, or None."""
    from paceline.data.stores.filesystem import place_of

    try:
        record, path = place_of(reference.sources[0], folder.path.parent.parent)
        # All machines that mount one file system see the same inode. A different folder at the same path has a different inode.
        return os.stat(f"{record.root}/{path}").st_ino
    except (OSError, PacelineError):
        return None


def _outputs(record: RunRecord, names: Sequence[str] | Mapping[str, object]) -> list[DataReference]:
    return [reference for reference in (record.job.inputs if record.job else ()) if reference.name in names]


def _finalizing(record: RunRecord) -> RunRecord:
    return dataclasses.replace(record, status=states.FINALIZING, exit_code=None, failure=None, ended_utc=None)


def _text(outputs: Sequence[DataReference], waits: str | None) -> str:
    names = ", ".join(repr(reference.name) for reference in outputs)
    return f"storing output {names}" + (f" {waits}" if waits else "")


def _say(folder: RunFolder, text: str) -> None:
    _append(folder.driver_log, f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}Z {text}\n")


def _append(path: os.PathLike[str], text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _is_of_size(path: os.PathLike[str], size: int) -> bool:
    try:
        return os.path.getsize(path) == size
    except OSError:
        return False
