"""Files stored by content: once each, under their SHA-256, in a datastore's folder.

Paceline does not upload a file whose content is already stored, even if its name differs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.data.stores.filesystem import Store, place_of
from paceline.data.stores.names import clean_path
from paceline.data.transfer.listing import FileInfo, list_source, path_in_store
from paceline.data.transfer.partial import FileToFetch, Partial
from paceline.data.transfer.progress import Meter, Progress
from paceline.data.transfer.reading import Reader, reader_of
from paceline.data.transfer.transfer import transfer
from paceline.data.transfer.upload import put_files, remove_file
from paceline.errors import DataError
from paceline.job.data_reference import Source

SHA256 = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)(?::(.*))?", re.DOTALL)
_AT_ONCE = 16


def parse_place(text: str, default_path: str) -> Source | None:
    """Return the location that a text names, or None for any other text.

    text: STORE, STORE:PATH, a URL or an absolute path. default_path: Path in the datastore if `text` is STORE alone.
    """
    if "://" in text or text.startswith("/"):
        return Source(path=text)
    match = _PLACE.fullmatch(text)
    if match is None:
        return None
    return Source(datastore=match[1], path=default_path if match[2] is None else match[2])


@contextlib.contextmanager
def opened(workspace_dir: Path, place: Source) -> Iterator[tuple[Store, str]]:
    """Yield the opened store of `place`, and the folder in it ("" or "path/")."""
    record, path = place_of(place, workspace_dir)
    with Store(record) as store:
        plain = clean_path(path, store.title).rstrip("/")
        yield store, f"{plain}/" if plain else ""


def found_below(store: Store, place: Source, path: str) -> list[FileInfo]:
    """Return the files below a path, [] if it does not exist."""
    try:
        return list_source(store, place, path)
    except DataError:
        return []


def hash_stored(store: Store, reader: Reader, info: FileInfo) -> str:
    """Read a file of the store, and return its SHA-256.

    reader: A reader of the store. Pass the same reader for all files, because each reader of S3 opens its own client.

    Raises:
        TransferError: The file can't be read.
    """
    digest, path = hashlib.sha256(), path_in_store(info)
    with store.translating(f"reading {path!r}"):
        reader.read(path, 0, info.size, info.version, True, digest.update)
    return digest.hexdigest()


class Blobs:
    """The content-addressed files in a store's folder, as listed by `refresh`."""

    def __init__(self, store: Store, place: Source, path: str) -> None:
        self._store, self._place, self._path = store, place, path.rstrip("/")
        self.refresh()

    def refresh(self) -> None:
        """List the files in the store again, to see changes by other processes."""
        found = found_below(self._store, self._place, f"{self._path}/")
        self._infos = {info.path.rpartition("/")[2]: info for info in found}

    def names(self) -> set[str]:
        """Return the SHA-256 hashes of all stored contents."""
        return {name for name in self._infos if SHA256.fullmatch(name)}

    def size(self, sha256: str) -> int:
        """Return the size in bytes of the content with this hash, 0 if missing."""
        return self._infos[sha256].size if sha256 in self._infos else 0

    def info(self, sha256: str) -> FileInfo:
        """Return the path and size (`FileInfo`) of the content with this hash."""
        return self._infos[sha256]

    def has(self, sha256: str, size_bytes: int, *, verify: bool = False) -> bool:
        """Return whether the content with this hash is stored with this size.

        verify: Also read every byte, and compare the hash.
        """
        info = self._infos.get(sha256)
        if info is None or info.size != size_bytes:
            return False
        return not verify or hash_stored(self._store, self._reader, info) == sha256

    def damaged(self, sizes: Mapping[str, int]) -> list[str]:
        """Return those keys of `sizes` (hash -> bytes) whose contents are missing or damaged."""
        with self._pool() as pool:
            whole = pool.map(lambda item: self.has(*item, verify=True), sizes.items())
            return [sha256 for sha256, is_whole in zip(sizes, whole, strict=True) if not is_whole]

    def put(
        self, files: Sequence[tuple[str, Path]], progress: Progress | None = None, *, are_plain: bool = False
    ) -> None:
        """Store files under their hashes, where `has` finds them after a `refresh`.

        Args:
            files: (SHA-256, file) pairs.
            progress: Called with the progress.
            are_plain: Refuse a file whose path contains a link.

        Raises:
            DataError, TransferError: The store can't be written.
        """
        if files:
            put_files(self._store, self._path, files, progress, are_plain=are_plain, by_content=True)

    def fetch(self, sizes: Mapping[str, int], folder: Path, progress: Progress | None = None) -> None:
        """Download contents by hash into `folder`. A file's name is its hash.

        The keys of `sizes` are the hashes. The caller must verify the files. A second call resumes a broken download.

        Raises:
            DataError, TransferError: The store can't be read.
        """
        jobs = [self._job(sha256, folder / sha256) for sha256 in sizes if not (folder / sha256).exists()]
        meter = Meter(progress, sum(job.size for job in jobs), len(jobs))
        transfer(self._store, jobs, meter)
        meter.finish()

    def remove(self, names: Collection[str]) -> None:
        """Remove stored contents by their hashes.

        Raises:
            TransferError: The store does not allow it.
        """
        paths = [path_in_store(self._infos[name]) for name in sorted(names)]
        with self._store.translating(f"removing from {self._path!r}"), self._pool() as pool:
            list(pool.map(lambda path: remove_file(self._store, path), paths))
        for name in names:
            del self._infos[name]

    @functools.cached_property
    def _reader(self) -> Reader:
        with self._store.translating("reading"):
            return reader_of(self._store)

    def _pool(self) -> ThreadPoolExecutor:
        # Use one thread for an SFTP store, because its library mixes up requests of several threads on its only connection.
        return ThreadPoolExecutor(1 if self._store.kind == "sftp" else _AT_ONCE)

    def _job(self, sha256: str, target: Path) -> FileToFetch:
        info = self._infos[sha256]

        def finish(partial: Partial) -> None:
            partial.finish(target, mode=0o600, mtime_ns=None)

        return FileToFetch(
            path=path_in_store(info),
            size=info.size,
            version=info.version,
            part=target.with_name(f"{target.name}.part"),
            place=finish,
            is_there=target.exists,
        )
