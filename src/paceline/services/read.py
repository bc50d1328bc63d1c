"""The record of a service as it is now, with somebody to look after it: whoever reads it starts that process again where it is
gone.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import ServiceNotFoundError
from paceline.runs import store as runs_store
from paceline.services import states, store
from paceline.services.folder import MARK, ServiceFolder
from paceline.services.record import GONE, UP, ServiceRecord
from paceline.system import detached_process, locks, processes
from paceline.system.detached_process import library_dir
from paceline.system.files import remove_tree

_MODULE = "paceline.services"
#: Supervisors that were started and never came to look after the service; after so many, it is not a kill that ends them.
_MOST_STARTS = 3


def record(folder: ServiceFolder) -> ServiceRecord:
    """The record as it is now. A service that is wanted and that nobody looks after is started again by this.

    Raises:
        ServiceNotFoundError: it has been deleted.
    """
    found = store.stored(folder)
    if not _needs_somebody(folder, found):
        return found
    if folder.workspace_dir in runs_store.only_shown:
        why = runs_store.from_elsewhere(folder.workspace_dir)
        return dataclasses.replace(found, state=states.NOT_RESPONDING, failure=why)
    is_here = not found.owner or found.owner.get("host") == socket.gethostname()
    if locks.is_held(folder.lock, here=is_here):
        return found
    if not is_here or not runs_store.is_mine(folder.record):
        # Deleted since it was read, it has no lock that is held either, and nothing is amiss.
        store.stored(folder)
        host = found.owner.get("host")
        failure = (
            f"nobody looks after it; it goes on when its owner looks at it on {host}, or by its systemd unit there"
        )
        return dataclasses.replace(found, state=states.NOT_RESPONDING, failure=failure)
    try:
        fd = locks.take(folder.lock)
    except FileNotFoundError:
        store.stored(folder)
        raise
    # Of several readers at once, one starts it.
    if fd is None:
        return found
    try:
        return _go_on(folder, fd)
    finally:
        # The supervisor has a descriptor of the same open file, by which the lock stays held.
        os.close(fd)


def all_records(workspace_dir: Path) -> Iterator[ServiceRecord]:
    """Every service's record, by name."""
    for folder in store.all_folders(workspace_dir):
        try:
            yield record(folder)
        except ServiceNotFoundError:
            continue


def start(folder: ServiceFolder, lock_fd: int, python: str | None = None) -> None:
    """Start the service's supervisor, detached, and hand it the open lock.

    Raises:
        OSError: no process can be started.
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


def _needs_somebody(folder: ServiceFolder, found: ServiceRecord) -> bool:
    wanted = store.wanted(folder)
    if wanted.state == UP:
        # What has failed is tried again with the next wish.
        return found.state != states.FAILED or wanted.serial != found.settled
    return found.state != states.STOPPED or wanted.serial != found.settled or wanted.state == GONE


def _go_on(folder: ServiceFolder, fd: int) -> ServiceRecord:
    # Read again, now that nobody else can write.
    found = store.stored(folder)
    if not _needs_somebody(folder, found):
        return found
    wanted = store.wanted(folder)
    if wanted.state != UP:
        processes.kill_with_variable(MARK, str(folder.path))
        if wanted.state == GONE:
            remove_tree(folder.path)
            raise ServiceNotFoundError(f"service {folder.name!r} is deleted.")
        remove_tree(folder.server)
        return store.change(
            folder, found, state=states.STOPPED, settled=wanted.serial, failure=None, updating=None, server_pid=None
        )
    starts = found.owner.get("starts", 0) + 1
    if starts > _MOST_STARTS:
        see = f"`paceline service logs {folder.name}` says why"
        failure = f"its supervisor ended {_MOST_STARTS} times before it could begin; {see}"
        owner = {**found.owner, "starts": 0}
        return store.change(
            folder, found, state=states.FAILED, settled=wanted.serial, failure=failure, updating=None, owner=owner
        )
    # Before the start: a supervisor that comes to look after the service writes this anew. One that was stopped or has failed
    # is on its way from here on.
    state = states.TRANSITIONING if found.state in states.AT_REST else found.state
    found = store.change(folder, found, state=state, owner={**runs_store.owner(), **found.owner, "starts": starts})
    python = found.owner.get("python")
    # The interpreter that deployed it may be gone with its environment; this one has Paceline as well.
    start(folder, fd, python if python and Path(python).exists() else None)
    return found
