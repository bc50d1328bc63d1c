"""Create services, and request changes of services from their supervisors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.data.stores.credentials import read_place
from paceline.errors import DataError, ServiceError, ServiceFailedError, ServiceNotFoundError
from paceline.job.notify import check_address, check_notify, check_programs, place_of
from paceline.runs import store as runs_store
from paceline.runs.record import user_name, utc_now
from paceline.services import keys, revise, store
from paceline.services.folder import ServiceFolder
from paceline.services.listener import check_free
from paceline.services.record import HEALTHY, NOT_RESPONDING, UP, DesiredState, Revision, ServiceRecord
from paceline.services.revision_spec import RevisionSpec, check_workers
from paceline.system import locks
from paceline.system.files import PRIVATE, write_json
from paceline.system.listening import is_loopback
from paceline.targets import configured

_PAUSE_S = 0.05
#: Seconds for which requests to an unreachable cluster are repeated before a deployment.
_CHECK_S = 20.0
#: Kinds of compute targets that can serve models on other hosts.
_KINDS = ("ssh", "slurm", "kubernetes")


def deploy(
    workspace_dir: Path,
    name: str,
    spec: RevisionSpec,
    *,
    workers: int = 1,
    host: str = "127.0.0.1",
    port: int | None = None,
    auth: bool | None = None,
    tls: tuple[str, str] | None = None,
    target: str = "local",
    overwrite: bool = False,
    notify: Sequence[str] | str = (),
    tags: Mapping[str, object] | None = None,
    description: str = "",
) -> ServiceFolder:
    """Create and start a service, and return without waiting for it.

    port: Port to listen at. With None or 0, the service chooses a free port at its first start, and keeps it.
    auth: Whether requests need a key; by default only if other machines can reach the host.
    tls: Paths of the certificate and its key, or None for HTTP.
    overwrite: Update an existing service of this name.
    notify: Receivers of a message when the service fails, or stays down although it is restarted.

    Raises:
        UserError: An argument is wrong. All mistakes that can be detected before a process starts are reported.
    """
    store.check_name(name)
    check_workers(workers)
    port = _checked_port(port)
    is_open = _check_target(workspace_dir, target, name, has_tls=tls is not None) or not is_loopback(host)
    needs_keys = is_open if auth is None else auth
    if not needs_keys and is_open:
        raise ServiceError(
            f"host={host!r} on {target!r} can be reached from other machines: a service there asks for a key. Leave out "
            "auth=False, or listen at 127.0.0.1 of 'local'."
        )
    tls_cert, tls_key = _checked_tls(tls)
    receivers = _receivers([notify] if isinstance(notify, str) else list(notify))
    folder = ServiceFolder(store.services_dir(workspace_dir) / name)
    if folder.record.exists():
        if not overwrite:
            raise ServiceError(
                f"there is a service {name!r} already. Change it by `paceline service update {name}`, delete it by `paceline "
                f"service delete {name}`, or deploy with overwrite=True (`--overwrite`)."
            )
        _overwrite(folder, spec, workers=workers, port=port, auth=auth)
        if receivers:
            write_json(folder.receivers, receivers, mode=PRIVATE)
        return folder
    _check_server()
    check_free(host, port)
    record = ServiceRecord(
        name=name,
        created_utc=utc_now(),
        since_utc=utc_now(),
        deployed_by=user_name(),
        target=target,
        host=host,
        port=port,
        scheme="http" if tls is None else "https",
        tls_cert=tls_cert,
        tls_key=tls_key,
        has_keys=needs_keys,
        tags={str(key): str(value) for key, value in (tags or {}).items()},
        description=description,
        owner=runs_store.owner(),
    )
    _make(folder, record, spec, workers, receivers)
    return folder


def update(
    folder: ServiceFolder,
    spec: RevisionSpec,
    *,
    workers: int | None = None,
    why: str,
    source_of: Revision | None = None,
) -> DesiredState:
    """Request that the service changes to a new revision.

    The service answers with its present revision until the new one is ready.

    spec: Models, script, environment and settings of the revision.
    workers: Number of model processes; None for the present number.
    why: The reason, shown to people.
    source_of: The revision whose source folder is copied; None for the present source folder.
    """
    if workers is not None:
        check_workers(workers)
    with store.editing(folder):
        made = revise.write(folder, spec, why=why, source_of=source_of)
        more = {} if workers is None else {"workers": workers}
        target = store.set_desired(folder, state=UP, revision=made.number, why=why, **more)
    store.record(folder)
    return target


def rollback(folder: ServiceFolder, number: int | None = None) -> DesiredState:
    """Request a change back to revision `number`, by default the previously served revision.

    Raises:
        ServiceError: The service has no such revision.
    """
    record = store.stored(folder)
    if number is None:
        before = [each for each in record.served if each < (record.revision or 0)]
        if not before:
            raise ServiceError(
                f"service {folder.name!r} has no revision before {record.revision} that was served. "
                f"`paceline service show {folder.name}` lists its revisions."
            )
        number = before[-1]
    store.revision(folder, number)
    return request(folder, state=UP, revision=number, why=f"rollback to revision {number}")


def request(folder: ServiceFolder, **changes: object) -> DesiredState:
    """Request changes of a service, such as `workers=2`. Return the new desired state."""
    with store.editing(folder):
        record, last = store.stored(folder), store.desired(folder)
        # If the last update has failed, begin with the revision that is still served, and not with the failed revision.
        if record.settled == last.serial and record.revision is not None:
            changes = {"revision": record.revision, "workers": record.workers or 1, **changes}
        target = store.set_desired(folder, **changes)
    with contextlib.suppress(ServiceNotFoundError):
        store.record(folder)
    return target


def wait(
    folder: ServiceFolder,
    serial: int,
    *,
    timeout_s: float | None = None,
    on_look: Callable[[ServiceRecord], object] | None = None,
) -> ServiceRecord:
    """Wait until a requested change of a service is done. Return the service's record.

    serial: The requested change's number (`DesiredState`). The wait also ends if a later change has replaced this change.
    on_look: Called with the record at each check.

    Raises:
        ServiceFailedError: The change failed or timed out; the message has the reason.
        ServiceNotFoundError: The service was deleted. After a request to delete the service, this error means success.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        record = store.record(folder)
        if on_look is not None:
            on_look(record)
        if record.settled >= serial:
            if record.failure is not None and record.settled == serial:
                raise ServiceFailedError(_failure_text(folder, record))
            return record
        if record.state == NOT_RESPONDING:
            raise ServiceFailedError(f"service {folder.name!r}: {record.failure}.")
        if deadline is not None and time.monotonic() > deadline:
            raise ServiceFailedError(
                f"service {folder.name!r} is {record.state} after {timeout_s:g} s; it goes on. "
                f"`paceline service logs {folder.name}` shows its progress."
            )
        time.sleep(_PAUSE_S)


def end(folder: ServiceFolder, state: str) -> None:
    """Stop a service (DOWN) or delete it (GONE). Return once its processes have ended."""
    # Open the lock file before its folder is deleted: the lock becomes free when the last process of the supervisor has ended.
    fd = os.open(folder.lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        serial = request(folder, state=state).serial
        with contextlib.suppress(ServiceNotFoundError):
            wait(folder, serial)
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_PAUSE_S)
    finally:
        os.close(fd)


def _failure_text(folder: ServiceFolder, record: ServiceRecord) -> str:
    if record.revision is not None and record.state == HEALTHY:
        before = f" Revision {record.revision} goes on being served."
    else:
        before = ""
    text = (record.failure or "").rstrip()
    return (
        f"service {folder.name!r}: {text}{'' if text.endswith(('.', '?', '!')) else '.'}{before} "
        f"`paceline service logs {folder.name}` has more."
    )


def _make(
    folder: ServiceFolder, record: ServiceRecord, spec: RevisionSpec, workers: int, receivers: Mapping[str, str | None]
) -> None:
    hidden = ServiceFolder(folder.path.with_name(f".new-{folder.name}-{os.urandom(4).hex()}"), folder.name)
    try:
        hidden.logs.mkdir(parents=True)
        hidden.revisions.mkdir()
        revise.write(hidden, spec, why="deployed")
        if record.has_keys:
            keys.make(hidden)
        if receivers:
            write_json(hidden.receivers, receivers, mode=PRIVATE)
        write_json(
            hidden.wanted,
            DesiredState(workers=workers, by=record.deployed_by, time_utc=record.created_utc, why="deployed").to_json(),
        )
        write_json(hidden.record, record.to_json())
        lock_fd = locks.take(hidden.lock)
        assert lock_fd is not None, "no other process knows this file"
        try:
            # The rename fails if the folder exists and is not empty, so the second of two concurrent deployments stops here.
            os.rename(hidden.path, folder.path)
            store.start_supervisor(folder, lock_fd)
        finally:
            os.close(lock_fd)
    except OSError as error:
        if folder.record.exists() and hidden.path.exists():
            raise ServiceError(f"there is a service {folder.name!r} already: it was deployed just now.") from error
        raise revise.not_written(folder.path.parent, error) from error
    finally:
        shutil.rmtree(hidden.path, ignore_errors=True)


def _overwrite(folder: ServiceFolder, spec: RevisionSpec, *, workers: int, port: int, auth: bool | None) -> None:
    record = store.stored(folder)
    if port and port != record.port:
        raise ServiceError(
            f"service {folder.name!r} listens at port {record.port}, and keeps it. To have it at {port}, delete it first: "
            f"`paceline service delete {folder.name}`."
        )
    if auth is not None and auth != record.has_keys:
        raise ServiceError(
            f"service {folder.name!r} asks for {'a' if record.has_keys else 'no'} key, and keeps to it. To change that, delete "
            f"it first: `paceline service delete {folder.name}`."
        )
    update(folder, spec, workers=workers, why="deployed again")


def _receivers(notify: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    check_programs(notify := check_notify(notify), is_here=True)
    for one in notify:
        try:
            found[one] = None if (place := place_of(one)) is None else read_place(place)
            check_address(one, found[one] or "https://")
        except DataError as error:
            raise ServiceError(f"notify={one!r}: {error}") from error
    return found


def _checked_port(port: object) -> int:
    if port is None:
        return 0
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ServiceError(f"port must be 1 to 65535, or 0 for a free port, got {port!r}.")
    return port


def _checked_tls(tls: tuple[str, str] | None) -> tuple[str | None, str | None]:
    if tls is None:
        return None, None
    for path in tls:
        if not os.path.isfile(os.path.expanduser(path)):
            raise ServiceError(f"tls: there is no file {path!r}. Give the PEM files of certificate and key.")
    cert, key = (os.path.abspath(os.path.expanduser(path)) for path in tls)
    return cert, key


def _check_target(workspace_dir: Path, target: str, name: str, *, has_tls: bool) -> bool:
    """Check that the target can serve. Return whether other machines reach its services."""
    config = configured.read(workspace_dir, target)
    if config.kind == configured.LOCAL:
        return False
    if config.kind not in _KINDS or config.settings.get("login"):
        what = f"of the kind {config.kind!r}" if config.kind not in _KINDS else "behind a login host"
        raise ServiceError(
            f"target {target!r} is {what}: services run on 'local', ssh hosts, Kubernetes, and a Slurm whose nodes this machine "
            "reaches. To serve elsewhere, write a folder that needs no workspace: paceline package MODEL --entry SCRIPT -o DIR."
        )
    if config.kind == "kubernetes":
        if has_tls:
            raise ServiceError(
                f"target {target!r} is a Kubernetes cluster, whose Ingress has the certificate. Leave tls out."
            )
        found: Any = config.make()
        objects = found.service(name, workspace_dir)
        objects.cluster.patiently(objects.check, _CHECK_S)
    return config.kind != "ssh"


def _check_server() -> None:
    import importlib.util

    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ServiceError(f"{' and '.join(missing)} is not installed. Services need: pip install 'paceline[serve]'.")
