"""Content hashes of a dataset's files.

Object stores report a hash. Local files have only a modification time, so this module hashes their content. The hashes are
cached beside the data cache, keyed by inode, size and modification time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO

from paceline.data.stores.filesystem import Store, place_of
from paceline.data.transfer.cache import DataCache
from paceline.data.transfer.listing import FileInfo
from paceline.errors import TransferError
from paceline.job.data_reference import Source

_CHUNK = 1 << 20
_AT_ONCE = 4
#: Coarsest resolution of a file system's timestamps: 2 s on FAT.
_TICK_NS = 2 * 10**9
#: Seconds to wait for a lock of the hash database.
_BUSY_S = 30.0


def with_content(infos: Sequence[FileInfo], workspace_dir: Path) -> list[FileInfo]:
    """Return copies of `infos` in which a local file's `version` is its content hash.

    Raises:
        TransferError: A file can't be read.
    """
    paths = [_local_path(info, workspace_dir) for info in infos]
    if not any(paths):
        return list(infos)
    with known_digests() as known, ThreadPoolExecutor(_AT_ONCE) as pool:
        # Reading and hashing release the GIL, so threads save time. The threads never use the database connection.
        digests = pool.map(lambda path: known.digest(path) if path else None, paths)
        hashed = [replace(info, version=digest or info.version) for info, digest in zip(infos, digests, strict=True)]
        known.keep()
    return hashed


def content_fingerprint(infos: Sequence[FileInfo]) -> str:
    """Return a hash of all files' names, sizes and contents.

    Names are relative to the deepest common folder of the files, so a copy of this folder has the same fingerprint.

    Args:
        infos: The files with their content hashes, as `with_content` returns them.
    """
    # Begin with a format version, because fingerprints are stored in records.
    digest = hashlib.sha256(b"paceline content 1\0")
    # Start from `info.path`, because `info.relative` depends on how a dataset's source names the files.
    folders = [os.path.dirname(f"/{info.path.lstrip('/')}") for info in infos]
    top = os.path.commonpath(folders) if folders else "/"
    names = [os.path.relpath(f"/{info.path.lstrip('/')}", top) for info in infos]
    for line in sorted((name, str(info.size), info.version) for name, info in zip(names, infos, strict=True)):
        # Paths contain no NUL, so different lists never give the same bytes.
        digest.update("\0".join(line).encode("utf-8", "surrogateescape") + b"\0\0")
    return digest.hexdigest()


def _local_path(info: FileInfo, workspace_dir: Path) -> Path | None:
    record, path = place_of(Source(datastore=info.datastore, path=info.path), workspace_dir)
    if record.kind != "local":
        return None
    with Store(record) as store:
        return store.local(path)


def hash_rest(file: IO[bytes]) -> str:
    """Return the SHA-256 of an open file, from its position to its end."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


class Digests:
    """A cache of content hashes; `keep` saves the new hashes to its database."""

    def __init__(self, database: sqlite3.Connection | None) -> None:
        self._database = database
        rows = database.execute("SELECT file, sha256 FROM digests") if database else ()
        # Load all rows now: only this thread may use the SQLite connection, but `digest` runs in other threads.
        self._known: dict[str, str] = dict(rows)
        self._new: dict[str, str] = {}

    def digest(self, path: Path) -> str:
        try:
            with open(path, "rb") as file:
                return self.of(file)
        except OSError as error:
            raise TransferError(
                f"{str(path)!r} can't be read: {error.strerror}. Make it readable, or leave it out."
            ) from error

    def of(self, file: IO[bytes]) -> str:
        """Return an open file's SHA-256, from the cache if the file is unchanged."""
        # Use the status of the open file, because the path may name another file by now.
        status = os.fstat(file.fileno())
        key = f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
        if key in self._known:
            return self._known[key]
        sha256 = hash_rest(file)
        # A write soon after another may not change the modification time, so keep no hash of a recently written file.
        if os.fstat(file.fileno()).st_mtime_ns == status.st_mtime_ns < time.time_ns() - _TICK_NS:
            # Dictionary assignments are atomic, so no lock is needed: two threads that hash one file store the same value.
            self._known[key] = self._new[key] = sha256
        return sha256

    def keep(self) -> None:
        if self._database is not None and self._new:
            # Ignore an error, because a hash that is not stored is only computed again next time.
            with contextlib.suppress(sqlite3.Error), self._database:
                self._database.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?)", self._new.items())


@contextlib.contextmanager
def known_digests() -> Iterator[Digests]:
    """Yield the hash cache `<data cache>/digests.sqlite`, or an empty cache on failure."""
    database: sqlite3.Connection | None = None
    try:
        database = sqlite3.connect(DataCache().folder / "digests.sqlite", timeout=_BUSY_S)
        database.execute("CREATE TABLE IF NOT EXISTS digests (file TEXT PRIMARY KEY, sha256 TEXT)")
        digests = Digests(database)
    except sqlite3.Error:
        digests = Digests(None)
    try:
        yield digests
    finally:
        if database is not None:
            database.close()
