"""Runs on clusters that share no folder with the submitting machine: everything travels through a datastore.

    <datastore>/paceline/snapshots/<id>.tar.gz       the source, once for all runs that use it
    <datastore>/paceline/carried/<tree>/             folders and packages of the submitting machine that a job names, likewise
    <datastore>/paceline/runs/<run id>/start.tar.gz  the run's folder as it was made, and the workspace's datastores
    <datastore>/paceline/runs/<run id>/sealed        the values of its secrets, encrypted by a key that is in the job's ticket
    <datastore>/paceline/runs/<run id>/exec/         what is said to commands beside workers, and by them (`passage`)
    <datastore>/paceline/runs/<run id>/back/<n>      what has changed since (`delta`), signed, replayed here and then removed

Paceline itself goes with the job, as a package of Ray's, of which a cluster keeps one for each version.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import io
import json
import os
import secrets
import socket
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from paceline.targets.ray import delta
from paceline.targets.ray.client import RayClient, send_library
from paceline.targets.ray.entry import travel_entrypoint
from paceline.targets.ray.settings import RaySettings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: Of the submitting machine alone, or sent by other means.
_NOT_SENT = frozenset({"lock", "ballast", "snapshot", "home.json", "secrets.json", "exec_key"})
_LOOK_S = 1.0
#: Nobody looks again at a run that has ended, so what is left of it between here and there has to go at once.
_END_S = 2.0
#: Of HMAC-SHA256.
_SIGNATURE_BYTES = 32
#: As AES-GCM takes it (NIST SP 800-38D).
_NONCE_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Where a job on the cluster finds its run. No secrets: credentials are places, which have to hold them there too.

    start_sha256: of `start.tar.gz`, in hexadecimal: whoever can write to the datastore must not replace the job.
    snapshot_sha256: of the snapshot's files (`tree_sha256`), for the same reason; None where there is no snapshot.
    key: opens the run's sealed secrets, in hexadecimal; None where it has none. exec_key: signs what comes back, and encrypts
        what is said to commands beside workers (`passage`), in hexadecimal.
    """

    run_id: str
    snapshot_id: str | None
    folder: str | None
    url: str
    start_sha256: str
    snapshot_sha256: str | None
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    credentials: Mapping[str, str] | None = None
    key: str | None = None
    exec_key: str

    @property
    def record(self) -> StoreRecord:
        return StoreRecord(name=self.name, url=self.url, options=self.options, credentials=self.credentials)

    def word(self) -> str:
        """The ticket as one word of a command line."""
        return base64.urlsafe_b64encode(json.dumps(self.__dict__).encode()).decode()

    @classmethod
    def from_word(cls, word: str) -> Ticket:
        return cls(**json.loads(base64.urlsafe_b64decode(word)))


def run_prefix(run_id: str) -> str:
    return f"paceline/runs/{run_id}"


def snapshot_name(snapshot_id: str) -> str:
    return f"paceline/snapshots/{snapshot_id}.tar.gz"


# Up


def send_run(
    settings: RaySettings, client: RayClient, folder: RunFolder, library_dir: Path
) -> tuple[str, dict[str, Any]]:
    """Put into the datastore what the cluster needs of a run; the job's script and its runtime environment.

    Raises:
        DataError, TransferError: the datastore can't be written; what the job names is not here, or can't be sent; an output
            can't be stored here.
        EnvironmentSpecError: a package is not here.
    """
    workspace = folder.path.parent.parent
    record = store_record(settings, workspace)
    taken = pack_run(folder, reached=settings.datastore)
    expect(folder, taken.manifest.home if taken else ())
    snapshot_id = os.path.basename(os.readlink(folder.snapshot)) if folder.snapshot.is_symlink() else None
    with Store(record) as store, tempfile.TemporaryDirectory(prefix="paceline-") as made:
        start = Path(made) / "start.tar.gz"
        _pack_run(folder, workspace, start, _carried(store, taken))
        start_sha256 = hashlib.sha256(start.read_bytes()).hexdigest()
        files = [(f"{run_prefix(folder.run_id)}/start.tar.gz", start)]
        if snapshot_id is not None and not exists(store, snapshot_name(snapshot_id)):
            packed = Path(made) / "snapshot.tar.gz"
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
    """Put the values of the run's secrets into the store, encrypted; the key in hexadecimal, None where there are none.

    The datastore may be read by others than the user, and so may Ray's list of jobs, in which the ticket stands: neither of
    them alone tells a value.
    """
    values = read_json(folder.secrets)
    if not values:
        return None
    key = secrets.token_bytes(32)
    name = sealed_name(folder.run_id)
    put(store, name, encrypted(json.dumps(values).encode(), key, name))
    folder.secrets.unlink(missing_ok=True)  # its supervisor, who alone wants them, is there
    return key.hex()


def sealed_name(run_id: str) -> str:
    return f"{run_prefix(run_id)}/sealed"


def encrypted(data: bytes, key: bytes, name: str) -> bytes:
    """Return `data` encrypted and signed by AES-256-GCM, as the object `name`: under another name it is refused.

    Raises:
        TargetError: This Python has no `cryptography`.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + _cipher(key).encrypt(nonce, data, name.encode())


def decrypted(data: bytes, key: bytes, name: str) -> bytes | None:
    """Return the data of the object `name`, or None if it was not encrypted with this key under this name.

    Raises:
        TargetError: This Python has no `cryptography`.
    """
    cipher = _cipher(key)
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], name.encode())
    except (InvalidTag, ValueError):  # changed, or too short
        return None


def can_encrypt() -> bool:
    """Return whether this Python has `cryptography`."""
    try:
        _cipher(bytes(32))
    except TargetError:
        return False
    return True


def _cipher(key: bytes) -> AESGCM:
    # Imported here: only runs with secrets, and commands beside workers, need it.
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise TargetError(
            f"secrets and commands go through a datastore encrypted, for which {sys.executable} on {socket.gethostname()} needs "
            "cryptography. Install it there: pip install 'cryptography>=42'."
        ) from error
    return AESGCM(key)


def unsealed(store: Store, run_id: str, key: str) -> dict[str, str]:
    """The values that `_seal` has put into the store, which has them no longer then.

    Raises:
        TargetError: they are not there, or somebody has changed them.
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
    """Remove the secrets of a run that never fetched them."""
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


def _carried(store: Store, packed: Packed | None) -> dict[str, Any] | None:
    """Put what the job names here into the datastore, as far as it is not there yet; the manifest that says so."""
    if packed is None:
        return None
    for tree, files in packed.files.items():
        top = f"paceline/{FOLDER}/{tree}"
        if not exists(store, f"{top}.whole"):
            put_files(store, "", [(f"{top}/{name}", path) for name, path in files.items()])
            put(store, f"{top}.whole", b"")
    return replace(packed.manifest, store=store.record.to_json()).to_json()


def _pack_run(folder: RunFolder, workspace: Path, path: Path, carried: dict[str, Any] | None) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        if carried is not None:
            add_json(archive, f"run/{folder.carried.name}", carried)
        for entry in sorted(os.listdir(folder.path)):
            if entry not in _NOT_SENT:
                archive.add(folder.path / entry, arcname=f"run/{entry}")
        if (workspace / "datastores").is_dir():
            archive.add(workspace / "datastores", arcname="datastores")


# Back


def fetch_run(settings: RaySettings, folder: RunFolder) -> bool:
    """Bring the run's folder here up to date, at most once a second; one process does it, others take what is there.

    Whether another one is at it, so that more may come.

    Raises:
        DataError, TransferError: the datastore can't be read.
    """
    state = folder.path / ".travel.json"
    # A file may be in pieces in several parts; those that have come lie in the run's folder until the last one does.
    replica = Replica(folder.path, lambda record: take_record(folder, record))

    def replay(part: bytes) -> bool:
        try:
            return delta.replay(part, replica)
        except ValueError as error:
            raise TransferError(
                f"what the run sends back through datastore {settings.datastore!r} can't be taken: {error}. Has somebody else "
                f"written below {run_prefix(folder.run_id)!r} there?"
            ) from error

    # Two readers would replay one part into each other's half-written files. It is a lock among processes of this machine and
    # goes with its holder, however that ends.
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
                # After the record's end only the word that it was the end can follow, or, after a kill, the same once more.
                told["ended"] = delta.ends(part) if _has_end(folder) else replay(part)
                # First replayed, then noted, then removed: killed in between, the same part is replayed again, or lies in the
                # store until the run's end, when all of the run's objects go.
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
    """Return a part behind its signature, which holds for this run and this number alone."""
    return hmac.digest(bytes.fromhex(key), f"part {part_name(run_id, number)}\0".encode() + part, "sha256") + part


def _unsigned(store: Store, folder: RunFolder, number: int, signed: bytes) -> bytes:
    """Return the part behind its signature.

    Raises:
        TransferError: The run has not signed it as this part, or the key is not here.
    """
    try:
        key = folder.exec_key.read_text(encoding="ascii")
    except OSError as error:
        raise TransferError(
            f"what run {folder.run_id} sends back can't be checked: its key, {str(folder.exec_key)!r}, can't be read: "
            f"{error.strerror}. Look at the run as the user that submitted it."
        ) from error
    part = signed[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signed, signed_part(part, key, folder.run_id, number)):
        raise TransferError(
            f"{store.title}: {part_name(folder.run_id, number)!r} is not signed by the run. Has somebody else written below "
            f"{run_prefix(folder.run_id)!r} there? Remove that object, or cancel the run and submit it again."
        )
    return part


def _next_part(store: Store, folder: RunFolder, told: Mapping[str, Any]) -> bytes | None:
    """The part that is next, if it is there; the last one follows the record's end at once, and is waited for."""
    deadline = time.monotonic() + _END_S
    while True:
        part = get(store, part_name(folder.run_id, told["next"]))
        if part is not None or told.get("ended") or not _has_end(folder) or time.monotonic() > deadline:
            return part
        time.sleep(0.05)


def _has_end(folder: RunFolder) -> bool:
    return is_over(folder) or (read_json(folder.record) or {}).get("status") in states.TERMINAL


def _name_canceler(folder: RunFolder) -> None:
    """On the cluster a cancel is a signal; who asked for it is known here."""
    record, request = read_json(folder.record) or {}, read_json(folder.cancel_request) or {}
    if record.get("status") == states.CANCELED and (failed := run_store.failed_by_hand(folder)) is not None:
        report = failed["failure"].to_json()
        changed = {**record, **failed, "failure": report, "status": states.FAILED}
        write_json(folder.record, changed, mode=run_store.record_mode(record))
    elif record.get("status") == states.CANCELED and request.get("by") and record.get("canceled_by") != request["by"]:
        write_json(folder.record, {**record, "canceled_by": request["by"]}, mode=run_store.record_mode(record))


# A store's objects


def exists(store: Store, path: str) -> bool:
    if store.kind == "local":
        return store.local(path).exists()
    with store.telling(f"looking for {path!r}"):
        return bool(store.fs.exists(store.full(path)))


def get(store: Store, path: str) -> bytes | None:
    """An object's bytes; None where there is none."""
    if store.kind == "local":
        try:
            return store.local(path).read_bytes()
        except FileNotFoundError:
            return None
    with store.telling(f"reading {path!r}"):
        try:
            data: bytes = store.fs.cat_file(store.full(path))
            return data
        except FileNotFoundError:
            return None


def put(store: Store, path: str, data: bytes) -> None:
    """Let the store have an object, whole or not at all."""
    with tempfile.NamedTemporaryFile(prefix="paceline-") as file:
        file.write(data)
        file.flush()
        put_files(store, "", [(path, Path(file.name))])


def remove(store: Store, path: str) -> None:
    if store.kind == "local":
        store.local(path).unlink(missing_ok=True)
    else:
        store.fs.rm_file(store.full(path))


def unpack(data: bytes, folder: Path) -> None:
    """Put an archive into a new folder. We have made it, but others may be able to write where it lay.

    Raises:
        TargetError: a name or a link in it leads outside, or it has something that is no file, folder or link.
    """
    # By hand, not with filter="data": not each Python 3.10 has that, and it takes rights away from files.
    options: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
    linked = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            if (why := _wrong_with(member, folder)) is not None:
                raise TargetError(f"the archive of the run has the name {member.name!r}, which {why}.")
            member.mode &= 0o777  # neither setuid nor setgid comes from another machine
            archive.extract(member, folder, **options)
            if member.issym():
                linked.append(member)
    # Nothing was written through any of them.
    top = os.path.realpath(folder)
    for member in linked:
        if not f"{os.path.realpath(folder / member.name)}/".startswith(f"{top}/"):
            raise TargetError(
                f"the archive of the run has the name {member.name!r}, which is a link that leads outside, to "
                f"{member.linkname!r}."
            )


def tree_sha256(folder: Path) -> str:
    """Return a hash of a folder's names, contents, links and executable files, in hexadecimal.

    Not of the archive: one archive serves all runs of a snapshot, and is made once by one of them.
    """
    digest = hashlib.sha256()
    top = os.path.realpath(folder)
    for directory, folders, files in os.walk(top):
        folders.sort()
        for name in sorted((*folders, *files)):
            path = os.path.join(directory, name)
            mode, content = os.lstat(path).st_mode, hashlib.sha256()
            if stat.S_ISLNK(mode):
                content.update(os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    while data := file.read(1 << 20):
                        content.update(data)
            # A NUL ends the name, which has none.
            about = f"\0{stat.S_IFMT(mode)} {mode & 0o100} {content.hexdigest()}\0"
            digest.update(os.fsencode(os.path.relpath(path, top)) + about.encode())
    return digest.hexdigest()


def _wrong_with(member: tarfile.TarInfo, folder: Path) -> str | None:
    """Why a piece of an archive must not be written into the folder; None where it may."""
    if _leaves(member.name, folder):
        return "leads outside"
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return "is of no file, folder or link"
    if (folder / member.name).is_symlink():
        return "is there already, as a link"
    if member.issym() and os.path.isabs(member.linkname):
        return f"is a link that leads outside, to {member.linkname!r}"
    if member.islnk() and (_leaves(member.linkname, folder) or (folder / member.linkname).is_symlink()):
        return f"is a link that leads outside, to {member.linkname!r}"
    return None


def _leaves(name: str, folder: Path) -> bool:
    """Whether a name leads out of the folder, or through a link."""
    parts = name.split("/")
    return (
        name.startswith("/")
        or ".." in parts
        or any((folder / "/".join(parts[:count])).is_symlink() for count in range(1, len(parts)))
    )
