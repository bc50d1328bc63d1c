"""The current record of a run: from its files and locks (`store`), or from its engine (`remote_status`)."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, RunNotFoundError, RunStateError
from paceline.runs import controllers, remote_status, states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import is_run_id, is_trial
from paceline.runs.record import RunRecord, merged, utc_now
from paceline.system import locks
from paceline.system.files import is_full, read_json, write_json

if TYPE_CHECKING:
    from paceline.runs.remote_status import Channel


def record(folder: RunFolder) -> RunRecord:
    """Return the run's current record. If its supervisor was killed, record the end first.

    If the killed process controlled a sweep or a pipeline, start it again instead.

    Raises:
        RunNotFoundError: No record can be read.
    """
    found = store.stored(folder)
    if found.is_terminal:
        return found
    if (os.environ.get("PACELINE_RUN_ID") == folder.run_id) or not folder.lock.exists():
        # A folder without a lock is a copy on a remote node. The supervisor and the lock are on another machine.
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
    # This process can't open another user's lock. `is_held` finds such a lock in the kernel's list of this machine's locks.
    if not locks.is_held(folder.lock, here=store.was_here(found)):
        # Read the record again: the owner may have written the run's end and exited since the first read.
        found = store.stored(folder)
        if found.is_terminal:
            return found
        if not controllers.is_controlled(found):
            return store.set_right(folder)
        return controllers.resume(folder, found, _end_children)
    # The process that holds the lock may just be closing an abandoned run. In this case the file `closing` exists.
    return store.deserted(folder, found) if folder.closing.exists() else store.shown(folder, found)


def _end_children(parent: RunFolder) -> None:
    kind = store.stored(parent).kind
    for path in parent.path.parent.glob(f"{glob.escape(parent.run_id)}_*"):
        with contextlib.suppress(PacelineError, OSError):
            if is_trial(path.name) and not store.stored(RunFolder(path)).is_terminal:
                reason = f"the {kind}'s controller can't begin"
                request_cancel(RunFolder(path), by=f"{kind} {parent.run_id}", reason=reason)


def raw(folder: RunFolder) -> dict[str, Any] | None:
    """Return the record as a dict without validating its job, or None."""
    state = read_json(folder.state)
    if not isinstance(state, dict):
        return None
    # A final record never changes, so don't check locks or query engines.
    if states.is_final(state):
        job = read_json(folder.job)
        return merged(job, state) if isinstance(job, dict) else None
    try:
        return record(folder).to_json()
    except RunNotFoundError:
        return None


def all_records(runs_dir: Path, *, trials: bool = True) -> Iterator[RunRecord]:
    """Yield all readable records, newest first; without trials and steps if trials=False."""
    yield from records_of(runs_dir, (run_id for run_id in store.ids(runs_dir) if trials or not is_trial(run_id)))


def records_of(runs_dir: Path, run_ids: Iterable[str]) -> Iterator[RunRecord]:
    """Yield the readable records of these runs, in the order of the ids."""
    for run_id in run_ids:
        try:
            yield record(RunFolder(runs_dir / run_id))
        except RunNotFoundError:
            continue


def _has_archived_parent(record: RunRecord, folder: RunFolder) -> bool:
    above: object = record.parent_run_id
    seen = {record.run_id}
    # Stop at a repetition, because damaged records may name each other as the parent run.
    while is_run_id(above) and above not in seen:
        seen.add(above)
        parent = RunFolder(folder.path.with_name(above))
        if tags_and_properties.read(parent.notes).is_archived:
            return True
        data = read_json(parent.job)
        above = data.get("parent_run_id") if isinstance(data, dict) else None
    return False


def channel(folder: RunFolder) -> Channel | None:
    """Return a channel to the run's supervisor; None if the supervisor shares this folder.

    Raises:
        RunStateError: This user cannot reach the supervisor.
    """
    if not folder.engine.exists():
        return None
    return remote_status.channel(folder)


def request_cancel(folder: RunFolder, by: str, reason: str = "", fail: str | None = None) -> None:
    """Request the end of a run, unless it was already requested.

    fail: A message. With it, the run ends as Failed, with this message. Without it, the run ends as Canceled.

    Raises:
        RunStateError: The run belongs to another user, and its folder cannot be written to.
    """
    try:
        # Write the request before asking the engine: a supervisor that shares this folder acts on the request alone.
        asked = {"by": by, "reason": reason, "time_utc": utc_now()}
        write_json(folder.cancel_request, asked if fail is None else {**asked, "fail": fail})
    except PermissionError as error:
        raise RunStateError(
            f"run {folder.run_id} belongs to {store.stored(folder).submitted_by or 'another user'}, and its folder, "
            f"{str(folder.path)!r}, can't be written to: {error.strerror}. Ask them to cancel it."
        ) from error
    except OSError as error:
        if not is_full(error):
            raise
        folder.cancel_request.touch()  # on a full disk make an empty file, which counts as a request
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
    archived: bool | None = None,
) -> bool:
    """Return whether a run passes all of these filters.

    tags: Tags that the run must have, as {tag: value}, or the name of one tag, whose value does not matter.
    children: Whether child runs pass. properties: Properties that the run must have, as {name: value}.
    archived: True: the run must be archived. False: the run must not be archived. None: both pass.
    """
    if (
        (record.parent_run_id and not children)
        or (kind is not None and record.kind != kind)
        or (status is not None and record.status != status)
    ):
        return False
    # Check tags, properties and archiving last, because they are in one more file to read for each run.
    if not tags and not properties and archived is None:
        return True
    noted = tags_and_properties.read(folder.notes)
    if archived is not None and archived != (noted.is_archived or _has_archived_parent(record, folder)):
        return False
    wanted = {tags: None} if isinstance(tags, str) else dict(tags or {})
    for key, value in wanted.items():
        if key not in noted.tags or (value is not None and noted.tags[key] != str(value)):
            return False
    return all(noted.properties.get(key) == str(value) for key, value in (properties or {}).items())
