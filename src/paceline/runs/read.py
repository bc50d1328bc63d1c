"""The record of a run as it is now, whoever looks after the run: its supervisor here, one on another machine, or nobody.

`store` knows this machine's files and locks, `remote_status` asks an engine; this decides which of the two is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, RunNotFoundError, RunStateError
from paceline.runs import controllers, remote_status, states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import is_trial
from paceline.runs.record import RunRecord, utc_now
from paceline.system import locks
from paceline.system.files import read_json, write_json

if TYPE_CHECKING:
    from paceline.runs.remote_status import Channel


def record(folder: RunFolder) -> RunRecord:
    """The record as it is now: set right first if nobody looks after the run any more.

    Raises:
        RunNotFoundError: there is no record that can be read.
    """
    found = store.stored(folder)
    if found.is_terminal:
        return found
    if _is_own(folder) or not folder.lock.exists():
        # Without a lock it is a node's copy of the folder: the supervisor, and the lock, are elsewhere.
        return store.shown(folder, found)
    if (workspace_dir := folder.path.parents[1]) in store.only_shown:
        if locks.is_held(folder.lock, here=store.was_here(found)):
            return store.shown(folder, found)
        why = store.from_elsewhere(workspace_dir)
        return dataclasses.replace(found, status=states.NOT_RESPONDING, waiting_for=why)
    if folder.engine.exists():
        if not controllers.is_controlled(found):
            return remote_status.read(folder, found)
        return controllers.in_engine(folder, found, _end_children)
    # Another user's lock can't be opened, only looked up in the kernel's list, which has locks of this machine alone.
    if not locks.is_held(folder.lock, here=store.was_here(found)):
        # The owner may have written the end and gone between our two looks.
        found = store.stored(folder)
        if found.is_terminal:
            return found
        if not controllers.is_controlled(found):
            return store.set_right(folder)
        return controllers.resume(folder, found, _end_children)
    # Whoever ends what is left of a run holds the lock meanwhile; by the mark it is told from a supervisor that lives.
    return store.deserted(found) if folder.closing.exists() else store.shown(folder, found)


def _end_children(parent: RunFolder) -> None:
    """Ask for the end of all that runs below a sweep or a pipeline: nobody will look any more at what it reaches."""
    kind = store.stored(parent).kind
    for path in parent.path.parent.glob(f"{glob.escape(parent.run_id)}_*"):
        with contextlib.suppress(PacelineError, OSError):
            if is_trial(path.name) and not store.stored(RunFolder(path)).is_terminal:
                reason = f"the {kind}'s controller can't begin"
                request_cancel(RunFolder(path), by=f"{kind} {parent.run_id}", reason=reason)


def _is_own(folder: RunFolder) -> bool:
    """True if this process is one of the run's own: then the run lives."""
    return os.environ.get("PACELINE_RUN_ID") == folder.run_id


def raw(folder: RunFolder) -> dict[str, Any] | None:
    """The record's JSON as `record` would give it, without the cost of building a job. None where there is none."""
    data = read_json(folder.record)
    if not isinstance(data, dict):
        return None
    # A final record is never written again, so it needs no look at locks or engines.
    if data.get("status") in states.TERMINAL:
        return data
    try:
        return record(folder).to_json()
    except RunNotFoundError:
        return None


def all_records(runs_dir: Path, *, trials: bool = True) -> Iterator[RunRecord]:
    """Every run's record, newest first; folders without a readable one are passed over. trials: those of sweeps, too."""
    for run_id in store.ids(runs_dir):
        if not trials and is_trial(run_id):
            continue
        try:
            yield record(RunFolder(runs_dir / run_id))
        except RunNotFoundError:
            continue


def channel(folder: RunFolder) -> Channel | None:
    """Return a channel to the run's supervisor for one command, or None if it shares this folder.

    Raises:
        RunStateError: This user has no access to it.
    """
    if not folder.engine.exists():
        return None
    return remote_status.channel(folder)


def request_cancel(folder: RunFolder, by: str, reason: str = "", fail: str | None = None) -> None:
    """Ask whoever looks after the run to end it. Asking twice changes nothing.

    fail: the run is to end as Failed, with this message, and not as Canceled.

    Raises:
        RunStateError: the run is another user's, and this one can't write to its folder.
    """
    try:
        # Written before the engine is told: a supervisor that sees this folder ends the run also where no engine answers.
        asked = {"by": by, "reason": reason, "time_utc": utc_now()}
        write_json(folder.cancel_request, asked if fail is None else {**asked, "fail": fail})
    except PermissionError as error:
        raise RunStateError(
            f"run {folder.run_id} belongs to {store.stored(folder).submitted_by or 'another user'}, and its folder, "
            f"{str(folder.path)!r}, can't be written to: {error.strerror}. Ask them to cancel it."
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder.cancel_request.touch()  # an empty file says it as well, and a full disk takes one
    if folder.engine.exists():
        remote_status.cancel(folder)


def matches(
    record: RunRecord,
    folder: RunFolder,
    *,
    kind: str | None = None,
    tags: Mapping[str, str] | str | None = None,
    properties: Mapping[str, str] | None = None,
    status: str | None = None,
    children: bool = False,
) -> bool:
    """True if the run passes every filter that is given.

    tags: a dict of tag -> value, or one tag's name, whatever its value. children: let runs with a parent through.
    """
    if record.parent_run_id and not children:
        return False
    if kind is not None and record.kind != kind:
        return False
    if status is not None and record.status != status:
        return False
    # Notes are a file more to be read for each run, so they come last.
    if not tags and not properties:
        return True
    noted = tags_and_properties.read(folder.notes)
    wanted = {tags: None} if isinstance(tags, str) else dict(tags or {})
    for key, value in wanted.items():
        if key not in noted.tags or (value is not None and noted.tags[key] != str(value)):
            return False
    return all(noted.properties.get(key) == str(value) for key, value in (properties or {}).items())
