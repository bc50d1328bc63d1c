"""List files in stores, with their sizes and versions."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from paceline.data.stores.filesystem import Store, place_of
from paceline.data.stores.names import check_relative, clean_path, is_pattern, pattern_base, pattern_regex
from paceline.data.stores.s3 import object_store
from paceline.data.transfer.reading import version_of
from paceline.errors import DataError
from paceline.job.data_reference import Source
from paceline.system.files import walk_files

_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """A file in a store.

    Attributes:
        datastore, path: The store, and the file's path in the store. Without a datastore, `path` is a URL or absolute.
        size: Size in bytes, or -1 if unknown.
        version: An etag or modification time, which changes with the content; "" if unknown.
        relative: The path at which a run finds the file, relative to the source's folder.
    """

    datastore: str | None
    path: str
    size: int
    version: str
    relative: str


def list_files(sources: Sequence[Source], workspace_dir: Path) -> list[FileInfo]:
    """List the files of these data sources without duplicates, sorted by path.

    A source is a folder with everything below it, a file, or a pattern with `*`, `?` and `**`. The path "" is the whole store.

    Raises:
        DataError: A store or path does not exist, or a file's name contains "..", a NUL or an overlong part.
        TransferError: The store can't be read.
    """
    files: dict[tuple[str | None, str], FileInfo] = {}
    for source in sources:
        record, path = place_of(source, workspace_dir)
        with Store(record) as store:
            for info in list_source(store, source, path):
                files.setdefault((info.datastore, info.path), info)
    return sorted(files.values(), key=lambda info: (info.path, info.datastore or ""))


def list_source(store: Store, source: Source, path: str) -> list[FileInfo]:
    """Return a data source's files, unsorted. `path` is its path in the store.

    Raises:
        DataError, TransferError: For the reasons that `list_files` gives.
    """
    path = clean_path(path, store.title)
    # In a plain http URL a "?" begins the query.
    is_url = store.kind == "http" and source.datastore is None
    magic = is_pattern(path) and not (is_url and "*" not in path)
    base = pattern_base(path) if magic else path.rstrip("/")
    with store.translating(f"listing {path!r}"):
        entries = list(_entries(store, base, is_folder=magic or path.endswith("/") or not path))
    if magic:
        matches = pattern_regex(path)
        entries = [entry for entry in entries if matches.fullmatch(entry.path)]
    if not entries and (magic or not _may_be_empty(store, base)):
        what = "no file matches" if magic else "there is nothing at"
        raise DataError(f"{what} {path!r} in {store.title}. `paceline data ls` lists the files.")
    infos = []
    for entry in entries:
        # If `base` names this file itself instead of a folder, the file's relative path is only its name.
        below = base.rpartition("/")[2] if entry.path == base else entry.path.removeprefix(f"{base}/")
        if is_url:
            # For example, "a%20b.csv?version=3" is the file "a b.csv".
            below = unquote(below.partition("?")[0])
        name = check_relative(below, store.title)
        infos.append(
            FileInfo(
                datastore=source.datastore,
                path=entry.path if source.datastore is not None else _plain(store, entry.path),
                size=entry.size,
                version=entry.version,
                relative=name,
            )
        )
    return infos


def path_in_store(info: FileInfo) -> str:
    """Return the file's path in its store."""
    if info.datastore is not None:
        return info.path
    return info.path.split("/", 3)[3] if "://" in info.path else info.path.lstrip("/")


def is_single_file(infos: Sequence[FileInfo], sources: Sequence[Source], workspace_dir: Path) -> bool:
    """Return whether the data sources are exactly one file."""
    if len(infos) != 1 or len(sources) != 1:
        return False
    record, path = place_of(sources[0], workspace_dir)
    return bool(path) and clean_path(path, record.title) == path_in_store(infos[0])


def fingerprint(infos: Iterable[FileInfo]) -> str:
    """Return a hash of all files' paths, sizes and versions."""
    digest = hashlib.sha256(b"paceline files 1\0")
    for line in sorted((info.path, str(info.size), info.version, info.datastore or "") for info in infos):
        digest.update("\0".join(line).encode("utf-8", "surrogateescape") + b"\0\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class _Entry:
    path: str
    size: int
    version: str


def _below(base: str, name: str) -> str:
    return f"{base}/{name}".strip("/")


def _plain(store: Store, path: str) -> str:
    return f"/{path}" if store.kind == "local" else f"{store.record.url}/{path}"


def _may_be_empty(store: Store, base: str) -> bool:
    """Return whether the folder `base` may exist although it has no files."""
    if not base:
        return True
    if store.kind == "local":
        return store.local(base).is_dir()
    if store.kind == "http":
        return True
    with store.translating(f"listing {base!r}"):
        return bool(store.fs.isdir(store.full(base)))


def _entries(store: Store, base: str, *, is_folder: bool) -> Iterator[_Entry]:
    """Yield the file `base`, or all files below the folder `base`."""
    if store.kind == "http":
        return _http(store, base, is_folder)
    return {"local": _local, "sftp": _sftp}.get(store.kind, _objects)(store, base)


def _local(store: Store, base: str) -> Iterator[_Entry]:
    top = store.local(base)
    if top.is_file():
        yield _local_entry(base, top.stat())
        return
    if not top.exists():
        return
    for name, entry, is_file in walk_files(top):
        if is_file:
            yield _local_entry(_below(base, name), entry.stat())
        else:
            _check_seen(entry)


def _check_seen(entry: os.DirEntry[str]) -> None:
    """Raise OSError for an unreadable entry, except a broken or circular link."""
    try:
        entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise


def _local_entry(path: str, found: os.stat_result) -> _Entry:
    # Include the inode, because a replaced file may keep size and times, as copies by rsync do.
    return _Entry(path, found.st_size, f"{found.st_mtime_ns}-{found.st_ino}")


def _sftp(store: Store, base: str) -> Iterator[_Entry]:
    from paceline.data.stores.sftp import walk_sftp

    full = store.full(base)
    try:
        status = store.fs.ftp.stat(full)
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode or 0):
        yield _Entry(base, int(status.st_size or 0), f"{status.st_mtime}")
        return
    for path, entry in walk_sftp(store.fs, full.rstrip("/")):
        yield _Entry(_below(base, path), int(entry.st_size or 0), f"{entry.st_mtime}")


def _http(store: Store, base: str, is_folder: bool) -> Iterator[_Entry]:
    url = store.full(base)
    if not is_folder:
        info = store.fs.info(url)
        # A URL is a folder if the server has redirected it to a URL with a final "/".
        if not str(info.get("url", "")).partition("?")[0].endswith("/"):
            yield _http_entry(base, info)
            return
    root = store.full("").rstrip("/") + "/"
    seen: list[str] = []
    waiting, known = [url.rstrip("/") + "/"], {url.rstrip("/") + "/"}
    while waiting:
        folder = waiting.pop()
        for link in store.fs.ls(folder, detail=False):
            name = str(link).partition("#")[0]
            # An index page also links to its parent, to other hosts, and to itself with another sort order ("?C=N;O=D").
            if "?" in name or not name.startswith(folder) or name in known:
                continue
            known.add(name)
            (waiting if name.endswith("/") else seen).append(name)
    # Sizes on index pages are unreliable, so request each file's size from the server.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for name, info in zip(seen, pool.map(store.fs.info, seen), strict=True):
            path = name[len(root) :]
            yield _http_entry(unquote(path) if store.record.name is not None else path, info)


def _http_entry(path: str, info: dict[str, Any]) -> _Entry:
    size = info.get("size")
    return _Entry(path, -1 if size is None else int(size), str(info.get("ETag") or info.get("Last-Modified") or ""))


def _objects(store: Store, base: str) -> Iterator[_Entry]:
    root = store.record.root
    listed = _from_obstore(store, base)
    objects = _from_fsspec(store, base) if listed is None else listed
    whole = f"{root}/{base}".rstrip("/")
    bucket = f"{root.partition('/')[0]}/"
    entries = []
    for key, size, version in objects:
        # Keys do not contain the bucket, so add it; fsspec's memory store has no bucket.
        full = key if store.kind == "memory" else bucket + key
        # "data" must not list "database/x", and the name of the bucket is not a file.
        if full.endswith("/") or not (full == whole or full.startswith(f"{whole}/")):
            continue
        entries.append(_Entry(full[len(root) :].removeprefix("/"), size, version))
    folders = {entry.path.rpartition("/")[0] for entry in entries}
    # Skip an empty object with the name of a folder, by which some tools mark the folder.
    yield from (entry for entry in entries if entry.size or entry.path not in folders)


def _from_obstore(store: Store, base: str) -> list[tuple[str, int, str]] | None:
    """Return (key, size, etag) of each object; None if obstore can't list this store."""
    objects = object_store(store)
    if objects is None:
        return None
    import obstore
    from obstore.exceptions import InvalidPathError

    prefix = "/".join(part for part in (store.record.root.partition("/")[2], base) if part)
    try:
        entries = [
            (str(meta["path"]), int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))
            for batch in obstore.list(objects, prefix=prefix or None, chunk_size=1000)
            for meta in batch
        ]
        if prefix and not entries:
            # obstore lists a prefix as a folder, so it finds no object of exactly this name: request the object itself.
            try:
                meta = obstore.head(objects, prefix)
            except FileNotFoundError:
                return []
            return [(prefix, int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))]
        markers = _markers(objects, entries)
        return [entry for entry in entries if entry[0] not in markers]
    except InvalidPathError:
        return None  # obstore can't list names with ".." or "//"; s3fs lists them, and the name check refuses them


def _markers(objects: Any, found: Sequence[tuple[str, int, str]]) -> set[str]:
    """Return the keys of objects that stand for empty folders.

    A web console creates the object "a/empty/" for an empty folder. obstore lists "a/empty", a file of 0 bytes.
    """
    import obstore

    empty = {key for key, size, _ in found if not size}
    # Send one request for each folder that contains empty objects, instead of one request for each empty object.
    folders = [
        obstore.list_with_delimiter(objects, prefix=parent or None)
        for parent in {key.rpartition("/")[0] for key in empty}
    ]
    below = {str(prefix).rstrip("/") for folder in folders for prefix in folder["common_prefixes"]}
    return (empty & below) - {str(meta["path"]) for folder in folders for meta in folder["objects"]}


def _from_fsspec(store: Store, base: str) -> list[tuple[str, int, str]]:
    entries = store.fs.find(store.full(base), detail=True, withdirs=False)
    if isinstance(entries, list):  # adlfs returns the name of a single file without its details
        entries = {name: store.fs.info(name) for name in entries}
    if not entries and store.kind == "azure":
        # adlfs returns an empty listing for a missing container. This call raises an error instead.
        store.fs.info(store.record.root.partition("/")[0])
    # Discard fsspec's cached listing, so that later requests see the store's current state.
    store.fs.invalidate_cache()
    bucket = "" if store.kind == "memory" else f"{store.record.root.partition('/')[0]}/"
    listed = []
    for name, info in entries.items():
        if info.get("type") == "directory":
            continue
        listed.append((str(name).removeprefix(bucket), int(info.get("size") or 0), version_of(info)))
    return listed
