"""The content of files, for datasets: stores of objects tell a hash themselves, a folder of this machine only the time of change.

A file's hash is kept beside the data cache under its inode, size and time of change, so that a file that nobody has
touched is read once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from paceline.data.stores.filesystem import Store, place_of
from paceline.data.transfer.cache import DataCache
from paceline.data.transfer.listing import FileInfo
from paceline.errors import TransferError
from paceline.job.data_reference import Source

_CHUNK = 1 << 20
_AT_ONCE = 4
#: Seconds to wait for another process that writes its hashes.
_BUSY_S = 30.0


def with_content(infos: Sequence[FileInfo], workspace_dir: Path) -> list[FileInfo]:
    """The same files; the version of one that lies in a folder of this machine is a hash of its content.

    Raises:
        TransferError: a file can't be read.
    """
    paths = [_local_path(info, workspace_dir) for info in infos]
    if not any(paths):
        return list(infos)
    with _known() as known, ThreadPoolExecutor(_AT_ONCE) as pool:
        # The threads read and hash, and both let go of the interpreter's lock. None of them touches the database.
        digests = pool.map(lambda path: known.digest(path) if path else None, paths)
        found = [replace(info, version=digest or info.version) for info, digest in zip(infos, digests, strict=True)]
        known.keep()
    return found


def content_fingerprint(infos: Sequence[FileInfo]) -> str:
    """A hash of the names below the deepest folder that holds them all, sizes and contents of all files, whatever their
    order: equal for a copy elsewhere. infos: of `with_content`.
    """
    # The first words name the way in which the hash is made. Fingerprints are kept in records, so another way needs other
    # words.
    digest = hashlib.sha256(b"paceline content 1\0")
    # Not `relative`: which depends on how a reference names the same files.
    folders = [os.path.dirname(f"/{info.path.lstrip('/')}") for info in infos]
    top = os.path.commonpath(folders) if folders else "/"
    names = [os.path.relpath(f"/{info.path.lstrip('/')}", top) for info in infos]
    for line in sorted((name, str(info.size), info.version) for name, info in zip(names, infos, strict=True)):
        # No path has a NUL in it, so two different lists can't come to the same bytes.
        digest.update("\0".join(line).encode("utf-8", "surrogateescape") + b"\0\0")
    return digest.hexdigest()


def _local_path(info: FileInfo, workspace_dir: Path) -> Path | None:
    record, path = place_of(Source(datastore=info.datastore, path=info.path), workspace_dir)
    if record.kind != "local":
        return None
    with Store(record) as store:
        return store.local(path)


class _Digests:
    """Hashes of files that are known already, and those that come to be."""

    def __init__(self, database: sqlite3.Connection | None) -> None:
        self._database = database
        rows = database.execute("SELECT file, sha256 FROM digests") if database else ()
        # All at once, for SQLite's connection may be used only by the thread that has opened it, and `digest` runs in others.
        self._known: dict[str, str] = dict(rows)
        self._new: dict[str, str] = {}

    def digest(self, path: Path) -> str:
        try:
            with open(path, "rb") as file:
                # Of the open file: by now the path may lead to another one.
                found = os.fstat(file.fileno())
                key = f"{found.st_dev}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
                if key not in self._known:
                    digest = hashlib.sha256()
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
                    # Several threads do this. Each assignment is whole by itself, and a file that two of them hash has one
                    # hash.
                    self._known[key] = self._new[key] = digest.hexdigest()
        except OSError as error:
            raise TransferError(
                f"{str(path)!r} can't be read: {error.strerror}. Make it readable, or leave it out."
            ) from error
        return self._known[key]

    def keep(self) -> None:
        if self._database is not None and self._new:
            # What can't be kept is hashed again the next time.
            with contextlib.suppress(sqlite3.Error), self._database:
                self._database.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?)", self._new.items())


@contextlib.contextmanager
def _known() -> Iterator[_Digests]:
    """The hashes of `<data cache>/digests.sqlite`; without them, if it can't be opened, everything is read."""
    database: sqlite3.Connection | None = None
    try:
        database = sqlite3.connect(DataCache().folder / "digests.sqlite", timeout=_BUSY_S)
        database.execute("CREATE TABLE IF NOT EXISTS digests (file TEXT PRIMARY KEY, sha256 TEXT)")
        digests = _Digests(database)
    except sqlite3.Error:
        digests = _Digests(None)
    try:
        yield digests
    finally:
        if database is not None:
            database.close()
