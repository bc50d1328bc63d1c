"""Services on disk: names, records, revisions and desired states.

Each file is written atomically. Only the holder of the service's lock writes `service.json`. `wanted.json` and the revisions have
another lock, and any user of the service may write them. A process that reads the record restarts a missing supervisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, ServiceError, ServiceNotFoundError
from paceline.runs import store as runs_store
from paceline.runs.record import Owner, user_name, utc_now
from paceline.runs.visible import visible
from paceline.services.folder import MARK, ServiceFolder
from paceline.services.record import (
    AT_REST,
    FAILED,
    GONE,
    NOT_RESPONDING,
    STOPPED,
    TRANSITIONING,
    UP,
    DesiredState,
    Revision,
    ServiceRecord,
)
from paceline.system import detached_process, locks, processes
from paceline.system.detached_process import library_dir
from paceline.system.files import OWNED, append_line, is_mine, read_json, remove_tree, write_json
from paceline.system.names import did_you_mean

# Pattern of a service's name, which is the rule of the Azure SDK.
_NAME = re.compile(r"[a-z](?:[-a-z0-9]{1,30}[a-z0-9])")
_LOCK_S = 30.0

_MODULE = "paceline.services"
#: If this many supervisors in a row end before they update the service's record, the service counts as failed.
_MOST_STARTS = 3


def check_name(name: object) -> str:
    """Return the name of a service if it is valid.

    Raises:
        ServiceError: The name is not 3 to 32 lower-case letters, digits and dashes, a letter first and no dash last.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ServiceError(
            f"the service name {name!r}: give 3 to 32 lower-case letters, digits and '-', a letter first, no '-' at the end, "
            "such as 'digits'."
        )
    return name


def services_dir(workspace_dir: Path) -> Path:
    return workspace_dir / "services"


def folder_of(workspace_dir: Path, name: object) -> ServiceFolder:
    """Return the folder of an existing service.

    Raises:
        ServiceError: The name is not valid.
        ServiceNotFoundError: No service has this name. The message lists the names of existing services.
    """
    folder = ServiceFolder(services_dir(workspace_dir) / check_name(name))
    if not folder.record.exists():
        known = [each.name for each in all_folders(workspace_dir)]
        there = f"There are {', '.join(known)}." if known else "There is none yet: `paceline service deploy` makes one."
        meant = did_you_mean(str(name), known)
        raise ServiceNotFoundError(f"there is no service {name!r} in {str(workspace_dir)!r}.{meant} {there}")
    return folder


def all_folders(workspace_dir: Path) -> list[ServiceFolder]:
    """Return the folders of all services, sorted by name."""
    with contextlib.suppress(OSError):
        folders = map(ServiceFolder, sorted(services_dir(workspace_dir).iterdir()))
        return [folder for folder in folders if _NAME.fullmatch(folder.name) and folder.record.exists()]
    return []


def stored(folder: ServiceFolder) -> ServiceRecord:
    """Read the service's record from disk, without checking the supervisor.

    Raises:
        ServiceNotFoundError: The record is unreadable: the service has been deleted.
    """
    data = read_json(folder.record)
    if not isinstance(data, dict):
        raise ServiceNotFoundError(f"there is no service {folder.name!r} in {str(folder.workspace_dir)!r} any more.")
    return ServiceRecord.from_json({**data, "served": tuple(data.get("served") or ())})


def change(folder: ServiceFolder, record: ServiceRecord, **changes: Any) -> ServiceRecord:
    """Write a service's record with `changes`. Log a changed state. The caller holds the lock."""
    now = utc_now()
    new = dataclasses.replace(record, **changes)
    if new == record:
        return record
    if new.state != record.state:
        new = dataclasses.replace(new, since_utc=now)
        if new.state == FAILED:
            tell_down(folder, new)
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


def tell_down(folder: ServiceFolder, record: ServiceRecord) -> None:
    """Send messages that the service is down. Log messages that can't be sent."""
    receivers = read_json(folder.receivers) if is_mine(folder.receivers) else None
    if not receivers:
        return
    from paceline.runs.notify import Notification, first_lines, send  # slow to load, and few services notify anybody

    why = first_lines(record.failure or record.last_end or "")
    message = Notification(
        title=visible(f"service {record.name}: {record.state}"),
        topic="the service's failure",
        report=why,
        facts={"service": record.name, "more": f"paceline service logs {record.name}"},
        data={"service": record.name, "event": "failure", "state": record.state, "failure": why},
        folder=folder.path,
    )
    with open(folder.log, "a") as log:
        log.writelines(f"{why}\n" for why in send(message, receivers))


def revision(folder: ServiceFolder, number: int) -> Revision:
    """Read one revision of a service.

    Raises:
        ServiceError: The service has no such revision.
    """
    data = read_json(folder.revision(number).description)
    if not isinstance(data, dict):
        numbers = [each.number for each in revisions(folder)]
        raise ServiceError(f"service {folder.name!r} has no revision {number}. It has {', '.join(map(str, numbers))}.")
    return Revision.from_json(data)


def revisions(folder: ServiceFolder) -> list[Revision]:
    """Read all revisions of a service, oldest first."""
    with contextlib.suppress(OSError):
        paths = [path for path in folder.revisions.iterdir() if path.name.isdecimal()]
        numbers = sorted(int(path.name) for path in paths if (path / "revision.json").exists())
        return [revision(folder, number) for number in numbers]
    return []


def desired(folder: ServiceFolder) -> DesiredState:
    """Read the desired state of a service."""
    data = read_json(folder.wanted)
    return DesiredState.from_json(data) if isinstance(data, dict) else DesiredState(serial=0)


@contextlib.contextmanager
def editing(folder: ServiceFolder) -> Iterator[None]:
    """Hold the lock of the desired state and the revisions during a `with` block."""
    try:
        with locks.locked(folder.wanted_lock, patience_s=_LOCK_S):
            yield
    except locks.LockHeldError as error:
        raise ServiceError(str(error)) from error


def set_desired(folder: ServiceFolder, **changes: Any) -> DesiredState:
    """Write a service's desired state with `changes`. The caller holds the lock of `editing`."""
    last = desired(folder)
    new = dataclasses.replace(
        last, serial=last.serial + 1, by=user_name(), time_utc=utc_now(), **{"why": "", **changes}
    )
    write_json(folder.wanted, new.to_json())
    return new


def next_number(folder: ServiceFolder) -> int:
    """Return the number of the next revision. The caller holds the lock of `editing`."""
    return max((int(path.name) for path in folder.revisions.iterdir() if path.name.isdecimal()), default=0) + 1


def record(folder: ServiceFolder) -> ServiceRecord:
    """Return the service's current record. Restart the supervisor if it is not running.

    Raises:
        ServiceNotFoundError: The service has been deleted.
    """
    current = stored(folder)
    if not _needs_somebody(folder, current):
        return current
    if folder.workspace_dir in runs_store.only_shown:
        why = runs_store.from_elsewhere(folder.workspace_dir)
        return dataclasses.replace(current, state=NOT_RESPONDING, failure=why)
    is_here = not current.owner or current.owner.get("host") == socket.gethostname()
    if locks.is_held(folder.lock, here=is_here):
        return current
    if not is_here or not is_mine(folder.record):
        # The service may have been deleted meanwhile: then `stored` raises ServiceNotFoundError.
        stored(folder)
        host = current.owner.get("host")
        failure = f"its supervisor does not run; it restarts when its owner looks at it on {host}, or by its systemd unit there"
        return dataclasses.replace(current, state=NOT_RESPONDING, failure=failure)
    try:
        fd = locks.take(folder.lock)
    except FileNotFoundError:
        stored(folder)
        raise
    # Of several concurrent readers, only the one that takes the lock starts the supervisor.
    if fd is None:
        return current
    try:
        return _go_on(folder, fd)
    finally:
        # The supervisor has inherited a descriptor of the same open file, so the lock stays held.
        os.close(fd)


def all_records(workspace_dir: Path) -> Iterator[ServiceRecord]:
    """Yield the records of all services, sorted by name."""
    for folder in all_folders(workspace_dir):
        try:
            yield record(folder)
        except ServiceNotFoundError:
            continue


def start_supervisor(folder: ServiceFolder, lock_fd: int, python: str | None = None) -> None:
    """Start the service's supervisor in the background, with the service's lock.

    lock_fd: File descriptor of the locked lock file, which the supervisor inherits.
    python: The supervisor's interpreter; None for this process's interpreter.
    """
    with open(folder.log, "ab") as log:
        detached_process.start(
            _MODULE,
            folder.path,
            lock_fd,
            python=python or sys.executable,
            library_dir=library_dir(folder.workspace_dir),
            cwd=folder.path,
            stdout=log,
            stderr=log,
        )


def _needs_somebody(folder: ServiceFolder, current: ServiceRecord) -> bool:
    target = desired(folder)
    if target.state == UP:
        # Don't restart a failed service automatically, but only if a user has set its desired state since the failure.
        return current.state != FAILED or target.serial != current.settled
    return current.state != STOPPED or target.serial != current.settled or target.state == GONE


def _go_on(folder: ServiceFolder, fd: int) -> ServiceRecord:
    # Read the record again, now that this process holds the lock.
    current = stored(folder)
    if not _needs_somebody(folder, current):
        return current
    target = desired(folder)
    # A stopped service that has objects in a cluster needs a supervisor, too, which deletes the objects.
    if target.state != UP and not folder.cluster.exists():
        processes.kill_with_variable(MARK, str(folder.path))
        if target.state == GONE:
            remove_tree(folder.path)
            raise ServiceNotFoundError(f"service {folder.name!r} is deleted.")
        remove_tree(folder.server)
        return change(
            folder, current, state=STOPPED, settled=target.serial, failure=None, updating=None, server_pid=None
        )
    starts = current.owner.get("starts", 0) + 1
    if starts > _MOST_STARTS:
        see = f"`paceline service logs {folder.name}` says why"
        failure = f"its supervisor ended {_MOST_STARTS} times before it could begin; {see}"
        owner: Owner = {**current.owner, "starts": 0}
        return change(folder, current, state=FAILED, settled=target.serial, failure=failure, updating=None, owner=owner)

    # Write the number of starts first: the new supervisor overwrites `owner`, which resets this number.
    state = TRANSITIONING if current.state in AT_REST else current.state
    current = change(folder, current, state=state, owner={**runs_store.owner(), **current.owner, "starts": starts})
    python = current.owner.get("python")
    # If the interpreter that deployed the service was removed, use this interpreter, which has Paceline as well.
    start_supervisor(folder, fd, python if python and Path(python).exists() else None)
    return current


def services_using(workspace_dir: Path, model_id: str) -> list[str]:
    """Return the names of services that serve this model version.

    These services need the model's files as long as they run, because each new model process reads the files.
    """
    return models_in_use(workspace_dir).get(model_id, [])


def models_in_use(workspace_dir: Path) -> dict[str, list[str]]:
    """Return {version of a model, such as "digits:3": names of the services that serve it}."""
    used: dict[str, list[str]] = {}
    for folder in all_folders(workspace_dir):
        for model_id in _models(folder):
            used.setdefault(model_id, []).append(folder.name)
    return used


def _models(folder: ServiceFolder) -> set[str]:
    target = desired(folder)
    if target.state == GONE:
        return set()
    try:
        served = stored(folder).revision
        numbers = {target.revision, *([] if served is None else [served])}
        return {name for number in numbers for name in revision(folder, number).model_names}
    except PacelineError:
        return set()  # the service was deleted meanwhile
