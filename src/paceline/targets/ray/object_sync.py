"""Transfer runs through a datastore to clusters without a shared folder, and back.

    <datastore>/paceline/snapshots/<id>.tar.gz       the source, once for all runs that use it
    <datastore>/paceline/carried/<tree>/             folders and packages of the submitting machine that a job names
    <datastore>/paceline/runs/<run id>/start.tar.gz  the new run's folder, and the workspace's datastores
    <datastore>/paceline/runs/<run id>/sealed        the secrets' values, encrypted with a key in the job's ticket
    <datastore>/paceline/runs/<run id>/exec/         messages of `paceline exec` (`channel`)
    <datastore>/paceline/runs/<run id>/back/<n>      signed changes (`delta`); the submitting machine replays them

Paceline itself travels with the job, as a Ray package that the cluster caches for each version.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.data.stores.filesystem import Store, place_of
from paceline.data.stores.record import StoreRecord
from paceline.data.transfer.upload import put_files
from paceline.errors import TargetError, TransferError
from paceline.job.data_reference import Source
from paceline.remote.replica.apply import Replica
from paceline.remote.staging.packing import FOLDER, Packed, add_json, pack_run
from paceline.remote.staging.stage_out_local import expect, is_over, take_record
from paceline.runs import states
from paceline.runs import store as run_store
from paceline.runs.folder import RunFolder
from paceline.system import locks
from paceline.system.files import PRIVATE, read_json, write_json, write_whole
from paceline.system.handshake import TAG_BYTES, is_tag, tag
from paceline.system.scratch import Scratch
from paceline.targets.ray import delta
from paceline.targets.ray.client import RayClient, send_library
from paceline.targets.ray.entry import travel_entrypoint
from paceline.targets.ray.settings import RaySettings
from paceline.targets.ray.store_objects import decrypted, encrypted, exists, get, put, remove, tree_sha256

#: Files of a run's folder that `start.tar.gz` leaves out, because the cluster does not need them or gets them separately.
_NOT_SENT = frozenset({"lock", "ballast", "snapshot", "home.json", "secrets.json", "exec_key", "session"})
_LOOK_S = 1.0
#: Seconds that a reader of the final record waits for the last changes, because an ended run is not fetched again.
_END_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The location of a run in a datastore, passed to its Ray job.

    Attributes:
        start_sha256: SHA-256 of `start.tar.gz`, in hexadecimal, so that writers of the datastore can't replace the job.
        snapshot_sha256: `tree_sha256` of the snapshot, so that writers can't replace it; None without a snapshot.
        url, name, options, credentials: The datastore (`StoreRecord`). folder: Paceline's folder on the node, or None.
        key, exec_key: Keys in hexadecimal: of the secrets (or None); to sign changes and encrypt exec messages.
    """

    run_id: str
    snapshot_id: str | None
    folder: str | None
    url: str
    start_sha256: str
    snapshot_sha256: str | None
    name: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    credentials: Mapping[str, str] | None = None
    key: str | None = None
    exec_key: str

    @property
    def record(self) -> StoreRecord:
        return StoreRecord(name=self.name, url=self.url, options=self.options, credentials=self.credentials)

    def word(self) -> str:
        """Encode the ticket as one word of a command line."""
        return base64.urlsafe_b64encode(json.dumps(self.__dict__).encode()).decode()

    @classmethod
    def from_word(cls, word: str) -> Ticket:
        return cls(**json.loads(base64.urlsafe_b64decode(word)))


def run_prefix(run_id: str) -> str:
    return f"paceline/runs/{run_id}"


def snapshot_name(snapshot_id: str) -> str:
    return f"paceline/snapshots/{snapshot_id}.tar.gz"


# Functions that send a run from the submitting machine to the cluster


def send_run(
    settings: RaySettings, client: RayClient, folder: RunFolder, library_dir: Path
) -> tuple[str, dict[str, object]]:
    """Store a run in the datastore. Return its Ray job's script and environment.

    Raises:
        DataError, TransferError: The datastore can't be written; a file that the job names is missing here or can't be sent;
            this machine can't store an output of the run.
        EnvironmentSpecError: A package is missing here.
    """
    workspace = folder.path.parent.parent
    record = store_record(settings, workspace)
    taken = pack_run(folder, reached=settings.datastore)
    expect(folder, taken.manifest.home if taken else ())
    snapshot_id = os.path.basename(os.readlink(folder.snapshot)) if folder.snapshot.is_symlink() else None
    with Store(record) as store, Scratch("ray") as made:
        start = made / "start.tar.gz"
        _pack_run(folder, workspace, start, _carried(store, taken))
        start_sha256 = hashlib.sha256(start.read_bytes()).hexdigest()
        files = [(f"{run_prefix(folder.run_id)}/start.tar.gz", start)]
        if snapshot_id is not None and not exists(store, snapshot_name(snapshot_id)):
            packed = made / "snapshot.tar.gz"
            with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
                archive.add(os.path.realpath(folder.snapshot), arcname=".")
            files.append((snapshot_name(snapshot_id), packed))
        put_files(store, "", files)
        key = _seal(store, folder)
    exec_key = secrets.token_hex(32)
    write_whole(folder.exec_key, exec_key, mode=PRIVATE)
    package = send_library(client, library_dir)
    ticket = Ticket(
        run_id=folder.run_id,
        snapshot_id=snapshot_id,
        folder=settings.folder,
        url=record.url,
        start_sha256=start_sha256,
        snapshot_sha256=tree_sha256(folder.snapshot) if snapshot_id is not None else None,
        name=record.name,
        options=dict(record.options),
        credentials=dict(record.credentials) if record.credentials else None,
        key=key,
        exec_key=exec_key,
    )
    return travel_entrypoint(folder.run_id, settings.python, ticket.word()), {"working_dir": package}


def _seal(store: Store, folder: RunFolder) -> str | None:
    """Store the run's secrets encrypted. Return the key; None without secrets.

    A reader of a secret needs both the datastore and the key, which Ray's list of jobs shows to other users.
    """
    values = read_json(folder.secrets)
    if not values:
        return None
    key = secrets.token_bytes(32)
    name = sealed_name(folder.run_id)
    put(store, name, encrypted(json.dumps(values).encode(), key, name))
    folder.secrets.unlink(missing_ok=True)  # the supervisor on the cluster has a copy of the secrets
    return key.hex()


def sealed_name(run_id: str) -> str:
    return f"{run_prefix(run_id)}/sealed"


def unsealed(store: Store, run_id: str, key: str) -> dict[str, str]:
    """Return {secret: value} as stored by `_seal`, and remove the stored object.

    Raises:
        TargetError: The secrets are missing or were changed.
    """
    name = sealed_name(run_id)
    data = get(store, name)
    if data is None:
        raise TargetError(f"{store.title} has no {name!r}, the values of the run's secrets. Submit it again.")
    text = decrypted(data, bytes.fromhex(key), name)
    if text is None:
        raise TargetError(
            f"{store.title}: {name!r}, the values of the run's secrets, was changed by somebody without the run's key. Submit "
            "the run again."
        )
    values: dict[str, str] = json.loads(text)
    remove(store, name)
    return values


def remove_sealed(settings: RaySettings, folder: RunFolder) -> None:
    """Remove the stored secrets of a run whose job never fetched them."""
    with Store(store_record(settings, folder.path.parent.parent)) as store, contextlib.suppress(FileNotFoundError):
        remove(store, sealed_name(folder.run_id))


def store_record(settings: RaySettings, workspace: Path) -> StoreRecord:
    record, _ = place_of(Source(datastore=settings.datastore, path=""), workspace)
    if record.kind in ("http", "memory"):
        raise TargetError(
            f"compute target {settings.name!r}: runs can't travel through datastore {settings.datastore!r}, which is of kind "
            f"{record.kind!r}: both sides have to write there. Name another."
        )
    return record


def _carried(store: Store, packed: Packed | None) -> dict[str, object] | None:
    if packed is None:
        return None
    for tree, files in packed.files.items():
        top = f"paceline/{FOLDER}/{tree}"
        if not exists(store, f"{top}.whole"):
            put_files(store, "", [(f"{top}/{name}", path) for name, path in files.items()])
            put(store, f"{top}.whole", b"")
    return replace(packed.manifest, store=store.record.to_json()).to_json()


def _pack_run(folder: RunFolder, workspace: Path, path: Path, carried: dict[str, object] | None) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        if carried is not None:
            add_json(archive, f"run/{folder.carried.name}", carried)
        for entry in sorted(os.listdir(folder.path)):
            if entry not in _NOT_SENT:
                archive.add(folder.path / entry, arcname=f"run/{entry}")
        if (workspace / "datastores").is_dir():
            archive.add(workspace / "datastores", arcname="datastores")


# Functions that fetch a run from the cluster to the submitting machine


def fetch_run(settings: RaySettings, folder: RunFolder) -> bool:
    """Update the run's local copy from the datastore, at most once a second.

    Return whether another process is updating the copy now. In that case this call changes nothing.

    Raises:
        DataError, TransferError: The datastore can't be read.
    """
    state = folder.path / ".travel.json"
    # A large file arrives in pieces, in several objects of the store. The run's folder keeps them until the last one.
    replica = Replica(folder.path, lambda record: take_record(folder, record))

    def replay(part: bytes) -> bool:
        try:
            return delta.replay(part, replica)
        except ValueError as error:
            raise TransferError(
                f"what the run sends back through datastore {settings.datastore!r} can't be taken: {error}. Has somebody else "
                f"written below {run_prefix(folder.run_id)!r} there?"
            ) from error

    # Hold a lock, because two processes that apply the same changes would write the same files. A kill frees the lock.
    fd = locks.take(folder.path / ".travel.lock")
    if fd is None:
        return True
    try:
        told = read_json(state) or {"next": 0, "time": 0.0}
        if told.get("ended") or 0 <= time.time() - told["time"] < _LOOK_S:
            return False
        with Store(store_record(settings, folder.path.parent.parent)) as store:
            while (signed := _next_part(store, folder, told)) is not None:
                part = _unsigned(store, folder, told["next"], signed)
                # Skip the changes if the folder has the final record, for example from a process that was then killed.
                told["ended"] = delta.ends(part) if _has_end(folder) else replay(part)
                # Apply the changes, record their number, then remove them. A kill in between makes this repeat.
                told["next"] += 1
                write_json(state, told)
                _name_canceler(folder)
                with contextlib.suppress(Exception):
                    remove(store, part_name(folder.run_id, told["next"] - 1))
            if told.get("ended"):
                replica.close()
                folder.ballast.unlink(missing_ok=True)
                with contextlib.suppress(Exception):
                    store.fs.rm(store.full(run_prefix(folder.run_id)), recursive=True)
        write_json(state, {**told, "time": time.time()})
        return False
    finally:
        os.close(fd)


def part_name(run_id: str, number: int) -> str:
    return f"{run_prefix(run_id)}/back/{number:08d}"


def signed_part(part: bytes, key: str, run_id: str, number: int) -> bytes:
    """Return a part, preceded by a signature for this run and part number."""
    return tag(bytes.fromhex(key), f"part {part_name(run_id, number)}", part) + part


def _unsigned(store: Store, folder: RunFolder, number: int, signed: bytes) -> bytes:
    try:
        key = folder.exec_key.read_text(encoding="ascii")
    except OSError as error:
        raise TransferError(
            f"what run {folder.run_id} sends back can't be checked: its key, {str(folder.exec_key)!r}, can't be read: "
            f"{error.strerror}. Look at the run as the user that submitted it."
        ) from error
    part = signed[TAG_BYTES:]
    if not is_tag(signed[:TAG_BYTES], bytes.fromhex(key), f"part {part_name(folder.run_id, number)}", part):
        raise TransferError(
            f"{store.title}: {part_name(folder.run_id, number)!r} is not signed by the run. Has somebody else written below "
            f"{run_prefix(folder.run_id)!r} there? Remove that object, or cancel the run and submit it again."
        )
    return part


def _next_part(store: Store, folder: RunFolder, told: Mapping[str, Any]) -> bytes | None:
    """Return the next part of a run's changes; None if the cluster has not stored it yet."""
    deadline = time.monotonic() + _END_S
    while True:
        part = get(store, part_name(folder.run_id, told["next"]))
        if part is not None or told.get("ended") or not _has_end(folder) or time.monotonic() > deadline:
            return part
        time.sleep(0.05)


def _has_end(folder: RunFolder) -> bool:
    return is_over(folder) or run_store.has_ended(folder)


def _name_canceler(folder: RunFolder) -> None:
    """Record who canceled the run, which the cluster does not know."""
    state, request = read_json(folder.state) or {}, read_json(folder.cancel_request) or {}
    if state.get("status") != states.CANCELED:
        return
    if (failed := run_store.failed_by_hand(folder)) is not None:
        run_store.replace_state(folder, replace(run_store.stored(folder), **failed, status=states.FAILED))
    elif request.get("by") and state.get("canceled_by") != request["by"]:
        run_store.replace_state(folder, replace(run_store.stored(folder), canceled_by=request["by"]))
