"""Services on disk: their names, records, revisions and wishes; each file is written whole.

`service.json` has one writer at a time, the holder of the service's lock. `wanted.json` and revisions are written by whoever asks
for a change, under a lock of their own that is held for moments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ServiceError, ServiceNotFoundError
from paceline.runs.record import user_name, utc_now
from paceline.services.folder import ServiceFolder
from paceline.services.record import Revision, ServiceRecord, Wanted
from paceline.system import locks
from paceline.system.files import OWNED, append_line, read_json, write_json

# The Azure SDK's own rule.
_NAME = re.compile(r"[a-z](?:[-a-z0-9]{1,30}[a-z0-9])")
_LOCK_S = 30.0


def check_name(name: Any) -> str:
    """The same name.

    Raises:
        ServiceError: not 3 to 32 lower-case letters, digits and dashes, a letter first and no dash last.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ServiceError(
            f"the service name {name!r}: give 3 to 32 lower-case letters, digits and '-', a letter first, no '-' at the end, "
            "such as 'digits'."
        )
    return name


def services_dir(workspace_dir: Path) -> Path:
    return workspace_dir / "services"


def folder_of(workspace_dir: Path, name: Any) -> ServiceFolder:
    """The folder of an existing service.

    Raises:
        ServiceError: the name can't be one. ServiceNotFoundError: there is none of this name; the message lists those there are.
    """
    folder = ServiceFolder(services_dir(workspace_dir) / check_name(name))
    if not folder.record.exists():
        known = [each.name for each in all_folders(workspace_dir)]
        there = f"There are {', '.join(known)}." if known else "There is none yet: `paceline service deploy` makes one."
        raise ServiceNotFoundError(f"there is no service {name!r} in {str(workspace_dir)!r}. {there}")
    return folder


def all_folders(workspace_dir: Path) -> list[ServiceFolder]:
    """All services, by name."""
    with contextlib.suppress(OSError):
        found = map(ServiceFolder, sorted(services_dir(workspace_dir).iterdir()))
        return [folder for folder in found if _NAME.fullmatch(folder.name) and folder.record.exists()]
    return []


def stored(folder: ServiceFolder) -> ServiceRecord:
    """The record as it is written.

    Raises:
        ServiceNotFoundError: there is none that can be read: it has been deleted.
    """
    data = read_json(folder.record)
    if not isinstance(data, dict):
        raise ServiceNotFoundError(f"there is no service {folder.name!r} in {str(folder.workspace_dir)!r} any more.")
    return ServiceRecord.from_json({**data, "served": tuple(data.get("served") or ())})


def change(folder: ServiceFolder, record: ServiceRecord, **changes: Any) -> ServiceRecord:
    """The record with these changes, written; a new state is noted in `events.jsonl`. For the holder of the lock alone."""
    now = utc_now()
    new = dataclasses.replace(record, **changes)
    if new == record:
        return record
    if new.state != record.state:
        new = dataclasses.replace(new, since_utc=now)
    write_json(folder.record, new.to_json(), mode=OWNED)
    if (new.state, new.revision, new.failure) != (record.state, record.revision, record.failure):
        append_line(
            folder.events,
            {
                "time_utc": now,
                "state": new.state,
                "revision": new.revision,
                "workers": new.workers,
                "failure": new.failure,
            },
        )
    return new


def revision(folder: ServiceFolder, number: int) -> Revision:
    """One revision.

    Raises:
        ServiceError: there is none of this number.
    """
    data = read_json(folder.revision(number).description)
    if not isinstance(data, dict):
        numbers = [each.number for each in revisions(folder)]
        raise ServiceError(f"service {folder.name!r} has no revision {number}. It has {', '.join(map(str, numbers))}.")
    return Revision.from_json({**data, "models": tuple(data.get("models") or ())})


def revisions(folder: ServiceFolder) -> list[Revision]:
    """All revisions, the oldest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.revisions.iterdir():
            if path.name.isdecimal() and (path / "revision.json").exists():
                found.append(revision(folder, int(path.name)))
    return sorted(found, key=lambda each: each.number)


def wanted(folder: ServiceFolder) -> Wanted:
    """What the service should be now."""
    data = read_json(folder.wanted)
    return Wanted.from_json(data) if isinstance(data, dict) else Wanted(serial=0)


@contextlib.contextmanager
def asking(folder: ServiceFolder) -> Iterator[None]:
    """A block in which nobody else changes what is wanted, and no revision is added.

    Raises:
        ServiceError: somebody has held the lock for too long.
    """
    try:
        with locks.locked(folder.wanted_lock, patience_s=_LOCK_S):
            yield
    except locks.LockHeldError as error:
        raise ServiceError(str(error)) from error


def want(folder: ServiceFolder, **changes: Any) -> Wanted:
    """Write a new wish: the last one with these changes. Within `asking`."""
    last = wanted(folder)
    new = dataclasses.replace(
        last, serial=last.serial + 1, by=user_name(), time_utc=utc_now(), **{"why": "", **changes}
    )
    write_json(folder.wanted, new.to_json())
    return new


def next_number(folder: ServiceFolder) -> int:
    """The number of the next revision. Within `asking`."""
    taken = [int(path.name) for path in folder.revisions.iterdir() if path.name.isdecimal()]
    return max(taken, default=0) + 1
