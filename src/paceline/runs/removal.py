"""The end of a run's record: its folder gone, whole or not at all.

    runs/<run id>  ->  runs/.gone-<run id>-<token>  ->  nothing

The first step is one rename under the run's lock, so nobody ever meets half a run. Whoever is killed in the second leaves
a folder that no list shows; the next removal or list goes on with it. While it is being removed, its remover holds a
lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import RunNotFoundError, RunStateError
from paceline.runs import read, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.store import remove_containers
from paceline.system import locks
from paceline.system.files import names_in, remove_tree

GONE, NEW = ".gone-", ".new-"
#: Readers ask for a lock in passing, and a supervisor has it for a moment after the last record; one that is held for longer
#: is somebody's who looks after the run.
_LOCK_S = 10.0
#: Of a submission that was killed; a living one takes less than seconds.
_ABANDONED_S = 3600.0


def check_removable(record: RunRecord, *, force: bool = False) -> None:
    """Refuse a run that is not over. force: one whose engine can't be asked passes.

    Raises:
        RunStateError: it is not.
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
    """Remove a run that has ended: its folder, and what an engine still has of its containers. Its children stay.

    force: also one whose engine can't be asked (NotResponding).

    Raises:
        RunNotFoundError: there is no such run any more.
        RunStateError: it has not ended, or some of its files can't be removed; it is in no list any more then.
    """
    record = read.record(folder)
    check_removable(record, force=force)
    store.check_own(folder, "remove")
    # With a token, for another run may be given this id, and be removed, before the folder of the first is empty.
    gone = folder.path.with_name(f"{GONE}{folder.run_id}-{secrets.token_hex(4)}")
    # Whoever holds the lock is the only one who may write the record, so nobody can begin to look after the run meanwhile.
    with _locked(folder):
        record = store.stored(folder)  # a killed submission may have been taken up meanwhile
        if not force:
            check_removable(record)
        # While it still has its name: killed here, it is in the list, and can be removed again.
        remove_containers(record.job, record.run_id, all_ended=True)
        store.remove_scratch(folder, record)
        try:
            os.rename(folder.path, gone)
        except OSError as error:
            raise RunStateError(
                f"run {folder.run_id} can't be removed: {error.strerror}: {str(folder.path.parent)!r}."
            ) from error
    try:
        _delete(gone)
    except OSError as error:
        raise RunStateError(
            f"run {folder.run_id} is removed, but some of its files are another user's, and stay: {error.strerror}: "
            f"{error.filename!r}. Remove {str(gone)!r} as that user, or as root."
        ) from error


def sweep(runs_dir: Path) -> None:
    """Go on with removals that were killed, and remove what killed submissions have left. Never raises."""
    for name in names_in(runs_dir):
        with contextlib.suppress(OSError):
            if name.startswith(GONE) or (name.startswith(NEW) and _is_abandoned(runs_dir / name)):
                _delete(runs_dir / name)


def _delete(gone: Path) -> None:
    """Remove a folder, unless another process is at it.

    Raises:
        OSError: as `remove_tree`.
    """
    try:
        fd = os.open(gone, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        try:
            # It is given up however this process ends, so whoever comes next may go on with the folder.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            pass  # NFS has no such locks on folders; two who remove the same do no harm
        remove_tree(gone)
    finally:
        os.close(fd)


def _is_abandoned(new: Path) -> bool:
    # The lock is the last thing in a folder that is being made, so one that has none yet is told from an abandoned one by its
    # age.
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
        raise RunStateError(
            f"run {folder.run_id} is being looked after by another process. Try again when that has ended."
        )
    try:
        yield
    finally:
        os.close(fd)
