"""Readers of file bytes: one for each kind of store."""

from __future__ import annotations

import datetime as dt
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from paceline.data.stores.failures import ChangedError, ShortError
from paceline.data.stores.filesystem import Store
from paceline.data.stores.s3 import object_store

_CHUNK = 1 << 20
_BLOCK = 4 << 20
#: Bytes per chunk of a stream: a broken connection loses at most one chunk.
_STREAMED = 128 << 10

Sink: TypeAlias = "Callable[[bytes], None]"


class Reader(Protocol):
    """A thread-safe reader of a datastore's files."""

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        """Pass bytes start .. end - 1 of a file to `sink`, in order.

        Args:
            path: Path in the store.
            start: First byte.
            end: First byte after the range. -1 if the file's size is unknown; `whole` must then be True.
            version: The file's version when it was listed.
            whole: True if the range is the whole file.
            sink: Called with each chunk of bytes.

        Raises:
            ChangedError: The file has changed since the listing.
            ShortError: The file has fewer or more bytes than expected.
            Exception: Any error of the store's library.
        """


def reader_of(store: Store) -> Reader:
    """Return the reader of this datastore's files."""
    if store.kind in _READERS:
        return _READERS[store.kind](store)
    objects = object_store(store)
    return _FsspecReader(store) if objects is None else ObjectReader(store, objects)


class _Counted:
    """A byte counter that raises ShortError unless `wanted` bytes arrive (-1: any number)."""

    def __init__(self, sink: Sink, wanted: int, path: str) -> None:
        self._sink, self._wanted, self._path, self._got = sink, wanted, path, 0

    def __call__(self, data: bytes) -> None:
        if self._wanted >= 0 and self._got + len(data) > self._wanted:
            raise ShortError(f"{self._path!r} is longer than the {self._wanted} bytes that were promised")
        self._sink(data)
        self._got += len(data)

    def check(self) -> None:
        if self._wanted >= 0 and self._got != self._wanted:
            raise ShortError(f"{self._got} of {self._wanted} bytes of {self._path!r} came, then it ended")


class ObjectReader:
    """A reader of S3 that raises ChangedError if a file's etag has changed."""

    def __init__(self, store: Store, objects: Any) -> None:
        self._objects = objects
        self._prefix = store.record.root.partition("/")[2]

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        import obstore

        options = self._options(version)
        if not whole:
            options["range"] = (start, end)
        result = obstore.get(self._objects, self._key(path), options=options)
        self._check(result.meta, path, version, end if whole else None)
        counted = _Counted(sink, end - start, path)
        if end - start <= _CHUNK:
            counted(memoryview(result.bytes()))  # type: ignore[arg-type]
        else:
            for piece in result.stream(min_chunk_size=_STREAMED):
                counted(memoryview(piece))  # type: ignore[arg-type]
        counted.check()

    async def get_whole(self, path: str, size: int, version: str) -> memoryview:
        """Return all bytes of a small object.

        Raises:
            ChangedError, ShortError, Exception: The object has changed, has another size, or can't be read.
        """
        import obstore

        result = await obstore.get_async(self._objects, self._key(path), options=self._options(version))
        self._check(result.meta, path, version, size)
        data = memoryview(await result.bytes_async())
        if len(data) != size:
            raise ShortError(f"{len(data)} of {size} bytes of {path!r} came")
        return data

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _options(self, version: str) -> Any:
        return {"if_match": version} if version.startswith(('"', "W/")) else {}

    def _check(self, meta: Any, path: str, version: str, size: int | None) -> None:
        has_etag = version.startswith(('"', "W/"))
        _check_unchanged(path, not has_etag or meta["e_tag"] in (None, version))
        _check_unchanged(path, size in (None, meta["size"]))


class _HttpReader:
    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        # fsspec runs one event loop per process in a thread of its own. An HTTP session can only be used in this loop.
        from fsspec.asyn import sync

        fs = self._store.fs
        # `_stream` runs in fsspec's thread while this thread waits, so `sink` is called in that thread.
        sync(fs.loop, self._stream, fs, path, start, end, version, whole, sink)

    async def _stream(self, fs: Any, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        # Refuse compression: ranges and sizes would count compressed bytes.
        headers = {"Accept-Encoding": "identity", **fs.kwargs.get("headers", {})}
        if not whole:
            headers["Range"] = f"bytes={start}-{end - 1}"
            # Send only a strong etag: a weak etag (W/"...") never matches in If-Match (RFC 9110, 13.1.1).
            if version.startswith('"'):
                headers["If-Match"] = version
        session = await fs.set_session()
        url = fs.encode_url(self._store.full(path))
        async with session.get(url, **{**fs.kwargs, "headers": headers}) as response:
            response.raise_for_status()
            # Compare the version too: a server may ignore If-Match, and a request for the whole file is sent without If-Match.
            now = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
            _check_unchanged(path, not version or now == version)
            # A server without range support sends the whole file, so skip the bytes before `start`.
            skip = 0 if whole or response.status == 206 else start
            wanted = end - start if end >= 0 else -1
            counted, left = _Counted(sink, wanted, path), wanted
            async for data in response.content.iter_chunked(_CHUNK):
                piece = data[skip:]
                skip = max(0, skip - len(data))
                if not whole:
                    piece = piece[:left]
                    left -= len(piece)
                counted(piece)
                if left == 0 and not whole:
                    # The server ignores the range and sends the whole file: do not wait for the bytes after the range.
                    break
            counted.check()


class _SftpReader:
    def __init__(self, store: Store) -> None:
        self._store = store
        #: One connection serves the store. If threads send requests at the same time, paramiko may give a response to the wrong
        #: thread, and the right thread waits forever.
        self._one_at_a_time = threading.Lock()

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        full = self._store.full(path)
        counted = _Counted(sink, end - start, path)
        with self._one_at_a_time, self._store.fs.ftp.open(full, "rb") as file:
            _check_unchanged(path, f"{file.stat().st_mtime}" == version)
            for offset in range(start, end, _BLOCK):
                size = min(_BLOCK, end - offset)
                # Request all chunks at once: one round trip per chunk would be slow on a distant host.
                for data in file.readv(
                    [(at, min(32768, offset + size - at)) for at in range(offset, offset + size, 32768)]
                ):
                    counted(data)
            counted.check()
            # SFTP has no versions: a write during the read shows only in the modification time, before and after.
            status = file.stat()
            _check_unchanged(path, f"{status.st_mtime}" == version and (status.st_size or 0) >= end)


class _LocalReader:
    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        counted = _Counted(sink, end - start, path)
        with open(Path(self._store.local(path)), "rb", buffering=0) as file:
            # Check before and after reading, because a local file may be written at any time.
            _check_unchanged(path, _local_version(file.fileno()) == version)
            file.seek(start)
            left = end - start
            while left > 0 and (data := file.read(min(_BLOCK, left))):
                counted(data)
                left -= len(data)
            counted.check()
            _check_unchanged(path, _local_version(file.fileno()) == version)


def _local_version(fd: int) -> str:
    status = os.fstat(fd)
    return f"{status.st_mtime_ns}-{status.st_ino}"


class _FsspecReader:
    """A reader through fsspec that raises ChangedError if the version has changed."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        full = self._store.full(path)
        counted = _Counted(sink, end - start, path)
        for offset in range(start, end, _BLOCK):
            counted(self._store.fs.cat_file(full, start=offset, end=min(end, offset + _BLOCK)))
        counted.check()
        info = self._store.fs.info(full)
        _check_unchanged(path, int(info.get("size") or 0) >= end and version_of(info) == version)


_READERS: dict[str, Callable[[Store], Reader]] = {"local": _LocalReader, "http": _HttpReader, "sftp": _SftpReader}


def _check_unchanged(path: str, is_unchanged: bool) -> None:
    if not is_unchanged:
        raise ChangedError(path)


def version_of(info: dict[str, object]) -> str:
    """Return a file's version from fsspec's info, or ""."""
    # Take the etag, else GCS's generation, else the creation time, which is all that fsspec's memory store has.
    version = next((info[key] for key in ("ETag", "etag", "generation", "created") if info.get(key)), "")
    # fsspec's memory store gives the creation time as a number in a listing, but as a datetime for a single file.
    return str(version.timestamp() if isinstance(version, dt.datetime) else version)
