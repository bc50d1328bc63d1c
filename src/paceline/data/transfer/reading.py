"""Bytes of a file of a store, as they come: one small reader for each kind of store, all with the one method `read`."""

from __future__ import annotations

import datetime as dt
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from paceline.data.stores.failures import ChangedError, ShortError
from paceline.data.stores.filesystem import Store
from paceline.data.stores.objects import object_store

_CHUNK = 1 << 20
_BLOCK = 4 << 20
#: Of a stream that breaks off, fewer bytes than this are lost.
_STREAMED = 128 << 10

Sink: TypeAlias = "Callable[[bytes], None]"


class Reader(Protocol):
    """Reads one store. Called from several threads at once."""

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        """Give bytes start .. end - 1 of the file to `sink`, in order, in pieces.

        path: in the store. version: as it was listed. whole: these are all bytes of the file. end: -1, with `whole`, where
        the store tells no size.

        Raises:
            ChangedError: the file is another one now.
            ShortError: it ended early, or did not end. Anything else: whatever the store's library raises.
        """


def reader_of(store: Store) -> Reader:
    """The reader of this store."""
    if store.kind == "local":
        return _LocalReader(store)
    if store.kind == "http":
        return _HttpReader(store)
    if store.kind == "sftp":
        return _SftpReader(store)
    objects = object_store(store)
    return _FsspecReader(store) if objects is None else ObjectReader(store, objects)


class _Counted:
    """A sink that lets through as many bytes as were asked for."""

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
    """Reads S3 through obstore. The etag goes with every request, so a changed object is told by the server."""

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
        """All bytes of a small object.

        Raises:
            ChangedError, ShortError, others: as `read`.
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
        """Obstore's options of a request. Without an etag the version is a time, which servers know by the second only."""
        return {"if_match": version} if version.startswith(('"', "W/")) else {}

    def _check(self, meta: Any, path: str, version: str, size: int | None) -> None:
        if version.startswith(('"', "W/")) and meta["e_tag"] not in (None, version):
            raise ChangedError(path)
        if size is not None and meta["size"] != size:
            raise ChangedError(path)


class _HttpReader:
    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        # fsspec has one event loop for the process, in a thread of its own; a session belongs to it, and is used nowhere else.
        from fsspec.asyn import sync

        fs = self._store.fs
        # Runs in fsspec's thread while this one waits, so `sink` is called over there.
        sync(fs.loop, self._stream, fs, path, start, end, version, whole, sink)

    async def _stream(self, fs: Any, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        # Compressed, a range would be one of the compressed bytes, and sizes would not be those that were listed.
        headers = {"Accept-Encoding": "identity", **fs.kwargs.get("headers", {})}
        if not whole:
            headers["Range"] = f"bytes={start}-{end - 1}"
            # A strong etag alone: a weak one (W/"...") never matches in If-Match (RFC 9110, 13.1.1).
            if version.startswith('"'):
                headers["If-Match"] = version
        session = await fs.set_session()
        url = fs.encode_url(self._store.full(path))
        async with session.get(url, **{**fs.kwargs, "headers": headers}) as response:
            response.raise_for_status()
            # Compared once more, for servers may pass over If-Match, and a request for all of it has none.
            now = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
            if version and now != version:
                raise ChangedError(path)
            skip = 0
            if not whole and response.status != 206:
                skip = start  # a server without ranges sends all of it
            counted = _Counted(sink, end - start if end >= 0 else -1, path)
            left = end - start if end >= 0 else None
            async for data in response.content.iter_chunked(_CHUNK):
                piece = data[skip:] if skip else data
                skip = max(0, skip - len(data))
                if not whole and left is not None:
                    piece = piece[:left]
                    left -= len(piece)
                if piece:
                    counted(piece)
                if left == 0 and not whole:
                    # The server sends the whole file although a range was asked for: the rest of it is not waited for.
                    break
            counted.check()


class _SftpReader:
    def __init__(self, store: Store) -> None:
        self._store = store
        #: One connection serves the store. Of several threads that ask, paramiko gives each answer to whoever reads, and the
        #: one that it was for waits for ever.
        self._one_at_a_time = threading.Lock()

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        full = self._store.full(path)
        counted = _Counted(sink, end - start, path)
        with self._one_at_a_time, self._store.fs.ftp.open(full, "rb") as file:
            if f"{file.stat().st_mtime}" != version:
                raise ChangedError(path)
            for offset in range(start, end, _BLOCK):
                size = min(_BLOCK, end - offset)
                # Asked for all at once: one piece a round trip would make a distant host slow.
                for data in file.readv(
                    [(at, min(32768, offset + size - at)) for at in range(offset, offset + size, 32768)]
                ):
                    counted(data)
            counted.check()
            # SFTP has no versions: a file that is written to while it is read shows only by its time, before and after.
            found = file.stat()
            if f"{found.st_mtime}" != version or (found.st_size or 0) < end:
                raise ChangedError(path)


class _LocalReader:
    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        counted = _Counted(sink, end - start, path)
        with open(Path(self._store.local(path)), "rb", buffering=0) as file:
            # Before and after, because a file of this machine may be written to at any time.
            if _local_version(file.fileno()) != version:
                raise ChangedError(path)
            file.seek(start)
            left = end - start
            while left > 0 and (data := file.read(min(_BLOCK, left))):
                counted(data)
                left -= len(data)
            counted.check()
            if _local_version(file.fileno()) != version:
                raise ChangedError(path)


def _local_version(fd: int) -> str:
    found = os.fstat(fd)
    return f"{found.st_mtime_ns}-{found.st_ino}"


class _FsspecReader:
    """Any other file system: by blocks, with a look at the version when the last one has come."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, path: str, start: int, end: int, version: str, whole: bool, sink: Sink) -> None:
        full = self._store.full(path)
        counted = _Counted(sink, end - start, path)
        for offset in range(start, end, _BLOCK):
            counted(self._store.fs.cat_file(full, start=offset, end=min(end, offset + _BLOCK)))
        counted.check()
        info = self._store.fs.info(full)
        if int(info.get("size") or 0) < end or version_of(info) != version:
            raise ChangedError(path)


def version_of(info: dict[str, Any]) -> str:
    """The version of a file as fsspec tells it, as text; "" where it tells nothing."""
    # An etag where there is one, else GCS's generation. fsspec's memory has only the time at which a file was made.
    found = next((info[key] for key in ("ETag", "etag", "generation", "created") if info.get(key)), "")
    # fsspec's memory lists a number, and tells a time of one file.
    return str(found.timestamp() if isinstance(found, dt.datetime) else found)
