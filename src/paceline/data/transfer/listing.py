"""Which files a reference means, as they lie in their stores now: names, sizes and versions. Nothing is fetched."""

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
from paceline.data.stores.objects import object_store
from paceline.data.transfer.reading import version_of
from paceline.errors import DataError
from paceline.job.data_reference import Source
from paceline.system.files import walk_files

_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """A file where it lies.

    datastore, path: the store and the path in it; datastore None: `path` is a URL or an absolute path.
    size: in bytes. version: what changes when the content does: an etag, or the time of change; "" where the store tells
    neither. relative: the path below the reference's folder.
    """

    datastore: str | None
    path: str
    size: int
    version: str
    relative: str


def list_files(sources: Sequence[Source], workspace_dir: Path) -> list[FileInfo]:
    """The files of these sources, sorted by path; a file that several of them mean comes once.

    A source is a folder with all below it, a file, or a pattern with `*`, `?` and `**`; "" is the whole store.

    Raises:
        DataError: no such store, nothing at a path, or names that can't lie in a folder.
        TransferError: the store can't be read.
    """
    found: dict[tuple[str | None, str], FileInfo] = {}
    for source in sources:
        record, path = place_of(source, workspace_dir)
        with Store(record) as store:
            for info in list_source(store, source, path):
                found.setdefault((info.datastore, info.path), info)
    return sorted(found.values(), key=lambda info: (info.path, info.datastore or ""))


def list_source(store: Store, source: Source, path: str) -> list[FileInfo]:
    """The files of one source, unsorted. path: the source's, in the store.

    Raises:
        DataError, TransferError: as `list_files`.
    """
    path = clean_path(path, store.title)
    # In a plain http URL a "?" begins the query.
    magic = is_pattern(path) and not (store.kind == "http" and source.datastore is None and "*" not in path)
    base = pattern_base(path) if magic else path.rstrip("/")
    with store.telling(f"listing {path!r}"):
        entries = list(_entries(store, base, is_folder=magic or path.endswith("/") or not path))
    if magic:
        matches = pattern_regex(path)
        entries = [entry for entry in entries if matches.fullmatch(entry.path)]
    if not entries and (magic or not _may_be_empty(store, base)):
        what = "no file matches" if magic else "there is nothing at"
        raise DataError(f"{what} {path!r} in {store.title}. Look with `paceline data ls` what is there.")
    infos = []
    for entry in entries:
        below = entry.path[len(base) + 1 :] if base else entry.path
        if entry.path == base:
            # A file that was named exactly has its own name alone, without the folders above it.
            below = base.rpartition("/")[2]
        if store.kind == "http" and source.datastore is None:
            # "a%20b.csv?version=3" is the file "a b.csv".
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
    """The file's path in its store; of an unregistered one, which its URL names, what stands behind the host."""
    if info.datastore is not None:
        return info.path
    return info.path.split("/", 3)[3] if "://" in info.path else info.path.lstrip("/")


def is_single_file(infos: Sequence[FileInfo], sources: Sequence[Source], workspace_dir: Path) -> bool:
    """True if the sources name one file exactly, rather than a folder or a pattern that has just one."""
    if len(infos) != 1 or len(sources) != 1:
        return False
    record, path = place_of(sources[0], workspace_dir)
    return bool(path) and clean_path(path, record.title) == path_in_store(infos[0])


def fingerprint(infos: Iterable[FileInfo]) -> str:
    """A hash of path, size and version of all files, whatever their order: equal for the same data."""
    digest = hashlib.sha256(b"paceline files 1\0")
    for line in sorted((info.path, str(info.size), info.version, info.datastore or "") for info in infos):
        digest.update("\0".join(line).encode("utf-8", "surrogateescape") + b"\0\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class _Entry:
    path: str
    size: int
    version: str


def _plain(store: Store, path: str) -> str:
    """A path of an unregistered store as the URL or absolute path that names it."""
    return f"/{path}" if store.kind == "local" else f"{store.record.url}/{path}"


def _may_be_empty(store: Store, base: str) -> bool:
    """True if having no files is the truth about a folder that is there; an object store has the top, and those
    that a console made.
    """
    if not base:
        return True
    if store.kind == "local":
        return store.local(base).is_dir()
    if store.kind in ("sftp", "s3"):
        with store.telling(f"listing {base!r}"):
            return bool(store.fs.isdir(store.full(base)))
    return store.kind == "http"


def _entries(store: Store, base: str, *, is_folder: bool) -> Iterator[_Entry]:
    """The file `base`, or all files below the folder `base`; nothing where there is neither."""
    if store.kind == "local":
        return _local(store, base)
    if store.kind == "sftp":
        return _sftp(store, base)
    if store.kind == "http":
        return _http(store, base, is_folder)
    return _objects(store, base)


def _local(store: Store, base: str) -> Iterator[_Entry]:
    top = store.local(base)
    if top.is_file():
        yield _local_entry(base, top.stat())
        return
    if not top.exists():
        return
    for name, entry, is_file in walk_files(top):
        if is_file:
            yield _local_entry(f"{base}/{name}" if base else name, entry.stat())
        else:
            _check_seen(entry)


def _check_seen(entry: os.DirEntry[str]) -> None:
    """Nothing for what is no file: a pipe, a link that leads nowhere or to itself.

    Raises:
        OSError: this can't be seen, as behind a link into a folder of somebody else's; there may be a file.
    """
    try:
        entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise


def _local_entry(path: str, found: os.stat_result) -> _Entry:
    # With the inode, since a file that is put in the place of another may have its size and times, as rsync's copies have.
    return _Entry(path, found.st_size, f"{found.st_mtime_ns}-{found.st_ino}")


def _sftp(store: Store, base: str) -> Iterator[_Entry]:
    from paceline.data.stores.sftp import walk_sftp

    full = store.full(base)
    try:
        found = store.fs.ftp.stat(full)
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode or 0):
        yield _Entry(base, int(found.st_size or 0), f"{found.st_mtime}")
        return
    for path, entry in walk_sftp(store.fs, full.rstrip("/")):
        yield _Entry(f"{base}/{path}" if base else path, int(entry.st_size or 0), f"{entry.st_mtime}")


def _http(store: Store, base: str, is_folder: bool) -> Iterator[_Entry]:
    url = store.full(base)
    if not is_folder:
        info = store.fs.info(url)
        # A server of folders leads from "dir" to "dir/".
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
            # An index page also leads upwards, to other hosts, and to itself in another order ("?C=N;O=D").
            if "?" in name or not name.startswith(folder) or name in known:
                continue
            known.add(name)
            (waiting if name.endswith("/") else seen).append(name)
    # Index pages tell no sizes that could be relied on, so each file is asked for.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for name, info in zip(seen, pool.map(store.fs.info, seen), strict=True):
            path = name[len(root) :]
            yield _http_entry(unquote(path) if store.record.name is not None else path, info)


def _http_entry(path: str, info: dict[str, Any]) -> _Entry:
    size = info.get("size")
    version = str(info.get("ETag") or info.get("Last-Modified") or "")
    return _Entry(path, -1 if size is None else int(size), version)


def _objects(store: Store, base: str) -> Iterator[_Entry]:
    root = store.record.root
    found = _from_obstore(store, base)
    if found is None:
        found = _from_fsspec(store, base)
    whole = f"{root}/{base}" if base else root
    bucket = f"{root.partition('/')[0]}/"
    entries = []
    for key, size, version in found:
        # Keys come without the bucket; fsspec's memory has none.
        full = key if store.kind == "memory" else bucket + key
        # "data" must not list "database/x", and the bucket's own name is no file.
        if full.endswith("/") or not (full == whole or full.startswith(f"{whole}/")):
            continue
        entries.append(_Entry(full[len(root) :].removeprefix("/"), size, version))
    folders = {entry.path.rpartition("/")[0] for entry in entries}
    for entry in entries:
        # Some tools mark a folder by an empty object of its name.
        if entry.size or entry.path not in folders:
            yield entry


def _from_obstore(store: Store, base: str) -> list[tuple[str, int, str]] | None:
    """(key, size, etag) of what lies below; None where obstore can't tell."""
    objects = object_store(store)
    if objects is None:
        return None
    import obstore
    from obstore.exceptions import InvalidPathError

    prefix = "/".join(part for part in (store.record.root.partition("/")[2], base) if part)
    try:
        found = [
            (str(meta["path"]), int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))
            for batch in obstore.list(objects, prefix=prefix or None, chunk_size=1000)
            for meta in batch
        ]
        if prefix and not found:
            # A prefix means a folder to obstore.
            try:
                meta = obstore.head(objects, prefix)
            except FileNotFoundError:
                return []
            return [(prefix, int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))]
        markers = _markers(objects, found)
        return [one for one in found if one[0] not in markers]
    except InvalidPathError:
        return None  # a name with "..", "//" or the like: s3fs shows it, and it is refused by its name


def _markers(objects: Any, found: Sequence[tuple[str, int, str]]) -> set[str]:
    """Return the keys of empty folders that a console made: "a/empty/", which obstore lists as "a/empty", a file of 0 bytes."""
    import obstore

    empty = {key for key, size, _ in found if not size}
    # One request for each folder with something empty in it, not one for each empty file.
    folders = [
        obstore.list_with_delimiter(objects, prefix=parent or None)
        for parent in {key.rpartition("/")[0] for key in empty}
    ]
    below = {str(prefix).rstrip("/") for folder in folders for prefix in folder["common_prefixes"]}
    files = {str(meta["path"]) for folder in folders for meta in folder["objects"]}
    return (empty & below) - files


def _from_fsspec(store: Store, base: str) -> list[tuple[str, int, str]]:
    found = store.fs.find(store.full(base), detail=True, withdirs=False)
    # A later look at one file must ask the store, not what was listed now.
    store.fs.invalidate_cache()
    bucket = "" if store.kind == "memory" else f"{store.record.root.partition('/')[0]}/"
    listed = []
    for name, info in found.items():
        if info.get("type") == "directory":
            continue
        listed.append((str(name).removeprefix(bucket), int(info.get("size") or 0), version_of(info)))
    return listed
