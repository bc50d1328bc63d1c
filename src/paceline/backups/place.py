"""The folder of a datastore that has backups.

    <path>/contents/<sha256>       each file content once; the list of a backup's files counts as a content too
    <path>/backups/<id>.json       a backup; written last, so that only complete backups have this file
    <path>/lock.json               the process that makes or removes a backup now

Removing a backup deletes the contents that no other backup needs. While a process makes a backup, the lock prevents
removals: the new backup may need these contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.backups.manifest import Backup, BackupEntry, from_bytes, is_backup_id
from paceline.data.stores.filesystem import Store
from paceline.data.transfer.blobs import Blobs, found_below, opened, parse_place
from paceline.data.transfer.listing import path_in_store
from paceline.data.transfer.upload import put_new, read_bytes, remove_file
from paceline.errors import DataError
from paceline.job.data_reference import Source
from paceline.runs.record import seconds_of, user_name, utc_now
from paceline.system import processes
from paceline.system.scratch import Scratch

#: Default folder of the backups in a datastore.
DEFAULT_PATH = "backups"
#: After this many seconds, a lock that another machine holds counts as abandoned.
_ABANDONED_S = 24 * 3600.0
#: Index of starttime among the fields of /proc/<pid>/stat after the name (proc_pid_stat(5)).
_STARTTIME = 19


def place(text: str) -> Source:
    """Parse the place of backups: STORE, STORE:PATH, a URL or an absolute path.

    Raises:
        DataError: The text has none of these forms.
    """
    found = parse_place(text, DEFAULT_PATH)
    if found is None:
        raise DataError(f"{text!r} is not a place of backups. Write STORE, STORE:PATH, a URL or an absolute path.")
    return found


@contextlib.contextmanager
def open_backups(workspace_dir: Path, source: Source) -> Iterator[Backups]:
    """Yield the backups in a datastore's folder, open during a `with` block."""
    with opened(workspace_dir, source) as (store, path):
        yield Backups(store, source, path)


@dataclass(frozen=True)
class Backups:
    """The backups in a folder of an open datastore."""

    store: Store
    source: Source
    path: str

    @property
    def where(self) -> str:
        """The folder of the backups as a text for messages."""
        return repr(self.source.path) if self.source.datastore is None else self.store.title

    def all(self) -> list[Backup]:
        """Return all complete backups, oldest first."""
        found = found_below(self.store, self.source, f"{self.path}backups/")
        paths = {path_in_store(info) for info in found}
        ids = {path.rpartition("/")[2].removesuffix(".json") for path in paths}
        # Ignore files in subfolders: another backup location may be in such a subfolder, and the files are its backups.
        whole = [self._read(one) for one in ids if is_backup_id(one) and self._document(one) in paths]
        return sorted(whole, key=lambda backup: (backup.created_utc, backup.id))

    def get(self, backup_id: str | None) -> Backup:
        """Return the backup with this id, or the newest for None."""
        if backup_id is not None and is_backup_id(backup_id) and read_bytes(self.store, self._document(backup_id)):
            return self._read(backup_id)
        ids = [backup.id for backup in self.all()]
        if backup_id is None and ids:
            return self._read(ids[-1])
        there = f"There are: {', '.join(ids)}." if ids else "There is none. `paceline backup create` makes one."
        raise DataError(f"there is no backup {backup_id or ''}".rstrip() + f" in {self.where}. {there}")

    def blobs(self) -> Blobs:
        """Return the store of file contents, used by all backups."""
        return Blobs(self.store, self.source, f"{self.path}contents")

    def entries(self, backup: Backup) -> list[BackupEntry]:
        """Return the checked list of a backup's files.

        Raises:
            DataError: The list is damaged, or has an entry that is not allowed in backups.
        """
        data = read_bytes(self.store, f"{self.path}contents/{backup.manifest}") or b""
        if hashlib.sha256(data).hexdigest() != backup.manifest:
            raise DataError(f"the list of files of backup {backup.id} in {self.where} is damaged. Name another backup.")
        return from_bytes(data, self.where)

    def add(self, blobs: Blobs, backup: Backup, data: bytes) -> None:
        """Store the list of a backup's files, and then the backup itself.

        data: The list of the backup's files as JSON.

        Raises:
            DataError, TransferError: The datastore can't be written, or already has a backup with this id.
        """
        if not blobs.has(backup.manifest, backup.manifest_bytes):
            with Scratch("backup") as folder:
                file = folder / backup.manifest
                file.write_bytes(data)
                blobs.put([(backup.manifest, file)])
        if not put_new(self.store, json.dumps(backup.to_json()).encode() + b"\n", self._document(backup.id)):
            raise DataError(f"there is a backup {backup.id} in {self.where} already. Try again.")

    def remove(self, removed: Sequence[Backup], check_lock: Callable[[], None]) -> int:
        """Remove backups, and contents that no other backup needs.

        Return the number of freed bytes. `check_lock`, from `locked`, raises DataError if another process has taken the lock.

        Raises:
            DataError: The lock is lost, or a remaining backup's list of files can't be read. Nothing is removed.
        """
        gone = {backup.id for backup in removed}
        # Read the file lists of all backups that stay. The code below deletes every content that is in none of these lists.
        needed: set[str] = set()
        for backup in self.all():
            if backup.id not in gone:
                needed |= {backup.manifest, *(entry.sha256 for entry in self.entries(backup))}
        check_lock()
        with self.store.translating("removing backups"):
            for backup in removed:
                remove_file(self.store, self._document(backup.id))
        blobs = self.blobs()
        unneeded = blobs.names() - needed
        freed = sum(blobs.size(name) for name in unneeded)
        blobs.remove(unneeded)
        return freed

    @contextlib.contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        """Lock the backups' folder. Yield a function that raises DataError if the lock is lost."""
        path, pid = f"{self.path}lock.json", os.getpid()
        mine = {"host": socket.gethostname(), "pid": pid, "started": _start_of(pid), "boot_id": processes.boot_id()}
        text = json.dumps({**mine, "by": user_name(), "time_utc": utc_now(), "token": secrets.token_hex(8)}).encode()

        def check() -> None:
            if read_bytes(self.store, path) != text:
                raise DataError(f"another process has taken the lock {path!r} in {self.where}. Try again.")

        if not put_new(self.store, text, path):
            self._check_abandoned(path)
            with self.store.translating("removing an abandoned lock"), contextlib.suppress(FileNotFoundError):
                remove_file(self.store, path)
            if not put_new(self.store, text, path):
                self._check_abandoned(path)
        check()
        try:
            yield check
        finally:
            if read_bytes(self.store, path) == text:
                with self.store.translating("removing the lock"):
                    remove_file(self.store, path)

    def _check_abandoned(self, path: str) -> None:
        """Raise DataError if the process that holds the lock file `path` may still run."""
        try:
            holder = json.loads(read_bytes(self.store, path) or b"{}")
            host, pid, time_utc = holder.get("host"), holder.get("pid"), holder.get("time_utc")
        except (ValueError, AttributeError):
            return
        is_here = host == socket.gethostname() and type(pid) is int
        if is_here and (holder.get("boot_id"), holder.get("started")) != (processes.boot_id(), _start_of(pid)):
            return
        began, now = seconds_of(time_utc), time.time()
        if began is None or now - began > _ABANDONED_S:
            return
        raise DataError(
            f"a process (pid {pid} of {holder.get('by')} on {host}) works on the backups in {self.where} since "
            f"{time_utc}. Wait for its end. If it was killed, remove {path!r} there; it counts as abandoned after a day."
        )

    def _read(self, backup_id: str) -> Backup:
        data = read_bytes(self.store, self._document(backup_id))
        try:
            found = json.loads(data or b"")
        except ValueError:
            found = {}
        backup = Backup.from_json(found, self.where)
        if backup.id != backup_id:
            raise DataError(f"{backup_id} in {self.where} says that it is {backup.id}. Name another backup.")
        return backup

    def _document(self, backup_id: str) -> str:
        return f"{self.path}backups/{backup_id}.json"


def _start_of(pid: int) -> str | None:
    """Return a process's start time, or None if no process has this pid."""
    fields = processes.stat_of(pid)
    return fields[_STARTTIME] if fields else None
