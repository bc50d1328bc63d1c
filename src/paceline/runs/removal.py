"""Remove runs. A run's folder disappears from the list of runs immediately, or it stays unchanged.

    runs/<run id>  ->  runs/.gone-<run id>-<token>  ->  nothing

The first step is a rename under the run's lock, so no reader finds a part of a run. If a process is killed in the
second step, a hidden folder stays. The next process that removes or lists runs locks and deletes the hidden folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.errors import RunNotFoundError, RunStateError
from paceline.runs import read, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.store import remove_containers
from paceline.system import locks
from paceline.system.files import OWNED, names_in, remove_tree, write_json

GONE, NEW = ".gone-", ".new-"
#: Seconds to wait for a run's lock. A reader or an exiting supervisor holds it only for moments, but the run's owner longer.
_LOCK_S = 10.0
#: Age in seconds from which an unfinished new folder counts as left by a killed submission. Submissions take only seconds.
_ABANDONED_S = 3600.0


def check_removable(record: RunRecord, *, force: bool = False) -> None:
    """Raise an error unless the run has ended.

    force: Whether to accept a run whose engine does not answer (NotResponding).

    Raises:
        RunStateError: The run has not ended.
    """
    if record.is_terminal or (force and record.status == states.NOT_RESPONDING):
        return
    if record.status == states.NOT_RESPONDING:
        raise RunStateError(
            f"run {record.run_id} is NotResponding, so it may still run: {record.waiting_for}. "
            f"If it is gone for good: paceline cancel --force {record.run_id}"
        )
    raise RunStateError(
        f"run {record.run_id} is {record.status}, and only a run that has ended can be removed. "
        f"End it first: paceline cancel --wait {record.run_id}"
    )


def remove(folder: RunFolder, *, force: bool = False) -> None:
    """Remove an ended run for good, with its containers. Its children stay.

    force: Also remove a run whose engine does not answer (NotResponding).

    Raises:
        RunNotFoundError: The run does not exist any more.
        RunStateError: The run has not ended, or files cannot be removed. In the second case, lists omit the run.
    """
    gone = _gone(folder.path)
    move_out(folder, gone, force=force)
    try:
        _delete(gone)
    except OSError as error:
        raise RunStateError(
            f"run {folder.run_id} is removed, but some of its files are another user's, and stay: {error.strerror}: "
            f"{error.filename!r}. Remove {str(gone)!r} as that user, or as root."
        ) from error


def move_out(folder: RunFolder, place: Path, *, force: bool = False, mark: Mapping[str, str] | None = None) -> None:
    """Move an ended run's folder out of the list of runs, to `place`.

    mark: Content of the run's `deleted.json`, which is written before the move. force: As for `remove`.

    Raises:
        RunNotFoundError, RunStateError: As for `remove`.
    """
    record = read.record(folder)
    check_removable(record, force=force)
    store.check_own(folder, "remove")
    # Hold the lock: only its holder may write the record, so no other process can continue the run during the removal.
    with _locked(folder):
        record = store.stored(folder)  # read again: the run may have restarted before this lock was taken
        if not force:
            check_removable(record)
        # Remove containers before the rename: if this process is killed between the two, `paceline` still lists the run.
        remove_containers(record.job, record.run_id, all_ended=True)
        store.remove_scratch(folder, record)
        try:
            if mark is not None:
                unmark(folder)
                write_json(folder.deleted, mark, mode=OWNED)
            # If the trash has a run of the same id, such as an earlier start of this trial, delete that run.
            discard(place)
            os.rename(folder.path, place)
        except OSError as error:
            raise RunStateError(
                f"run {folder.run_id} can't be removed: {error.strerror}: {str(folder.path.parent)!r}."
            ) from error


def unmark(folder: RunFolder) -> None:
    """Remove a run's mark of deletion, `deleted.json`, and its partial copies."""
    for name in names_in(folder.path):
        if name == folder.deleted.name or name.startswith(f".{folder.deleted.name}."):
            (folder.path / name).unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Delete a folder outside the list of runs, if it exists.

    Raises:
        OSError: Parts of it can't be deleted, such as other users' files.
    """
    gone = _gone(path)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
        _delete(gone)


def _gone(path: Path) -> Path:
    # A random token makes the name unique, because another run with this id may be removed before this folder is deleted.
    return path.with_name(f"{GONE}{path.name}-{secrets.token_hex(4)}")


def sweep(runs_dir: Path) -> None:
    """Finish interrupted removals, and delete the folders of killed submissions. Never raises."""
    for name in names_in(runs_dir):
        with contextlib.suppress(OSError):
            if name.startswith(GONE) or (name.startswith(NEW) and _is_abandoned(runs_dir / name)):
                _delete(runs_dir / name)


def _delete(gone: Path) -> None:
    """Delete a folder unless another process is deleting it.

    Raises:
        OSError: As for `remove_tree`.
    """
    try:
        fd = os.open(gone, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        try:
            # The kernel releases this lock when the process ends, so the next removal can continue.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            pass  # NFS can't lock a folder, and two processes may safely delete one folder
        remove_tree(gone)
    finally:
        os.close(fd)


def _is_abandoned(new: Path) -> bool:
    # A submission locks the run at its end. So a folder without a held lock counts as abandoned only after some time.
    return time.time() - new.stat().st_mtime > _ABANDONED_S and not locks.is_held(RunFolder(new).lock)


@contextlib.contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    try:
        fd = locks.take_within(folder.lock, _LOCK_S)
    except FileNotFoundError:
        raise RunNotFoundError(f"there is no run {folder.run_id!r} any more.") from None
    except OSError as error:
        raise RunStateError(f"run {folder.run_id} can't be removed: {error.strerror}: {error.filename!r}.") from error
    if fd is None:
        raise RunStateError(f"another process works on run {folder.run_id}. Try again when it has ended.")
    try:
        yield
    finally:
        os.close(fd)
