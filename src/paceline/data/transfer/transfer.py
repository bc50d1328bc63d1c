"""Concurrent, resumable download of files from a store.

    lock the file's .part -> read its missing ranges -> check the size -> rename the .part to the destination

Large files are split into ranges, and failed requests are retried. A thread works on one small file at a time, so no thread
waits for a lock while it holds another lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

from paceline.data.stores.failures import ChangedError, ShortError, cause_of, translated
from paceline.data.stores.filesystem import Store
from paceline.data.stores.names import check_relative, check_tree
from paceline.data.transfer.listing import FileInfo, path_in_store
from paceline.data.transfer.partial import SINGLE_BYTES, FileToFetch, Partial, claim
from paceline.data.transfer.progress import Meter, Progress, size_text
from paceline.data.transfer.reading import ObjectReader, Reader, reader_of
from paceline.errors import TransferError

#: Number of files to transfer at once: the fastest number in tests with a server on two cores.
_FILES_AT_ONCE = 16
_RANGES_AT_ONCE = 8  # number of ranges of large files to transfer at once
_RANGE_BYTES = 16 << 20
#: Bytes after which progress is recorded: a kill loses at most this many bytes of each range.
_MARK_BYTES = 4 << 20
#: Maximum number of tries in a row to read a range without getting any bytes.
_TRIES = 5
_ALL_TRIES = 50  # maximum number of tries to read a range
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
#: Maximum number of restarts for an object that changes while it is read.
_CHANGES = 3

#: Size in bytes above which a file is streamed, and resumed after an interruption.
SMALL_BYTES = 1 << 20
_AT_ONCE = 32


def transfer(store: Store, jobs: Sequence[FileToFetch], meter: Meter) -> int:
    """Download these files, and return the number of bytes transferred.

    Raises:
        DataError, TransferError: A download failed. The other downloads are cancelled; partial files stay for a retry.
    """
    if not jobs:
        return 0
    with store.translating("opening it"):
        reader = reader_of(store)
    work = _Work(store, reader, meter)
    try:
        return work.run(jobs)
    finally:
        work.close()


class _Work:
    def __init__(self, store: Store, reader: Reader, meter: Meter) -> None:
        self._store, self._reader, self._meter = store, reader, meter
        #: Set at the first error and when the work has ended. Each write checks this event, so all threads stop soon.
        self._stop = threading.Event()
        self._fetched = 0
        #: Guards `_fetched`, and the creation of `_ranges`.
        self._guard = threading.Lock()
        # Use a second pool for ranges: threads of the first pool wait for ranges, so ranges queued in the same pool could
        # deadlock. A range submits no further work.
        self._ranges: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[FileToFetch]) -> int:
        pool = ThreadPoolExecutor(min(_FILES_AT_ONCE, len(jobs)), thread_name_prefix="paceline-fetch")
        try:
            if isinstance(self._reader, ObjectReader):
                jobs = self._without_small(pool, self._reader, jobs)
            # Start large files first, so that the transfer does not end with a single large file.
            waiting = [pool.submit(self._do, job) for job in sorted(jobs, key=lambda job: -job.size)]
            _first_error(waiting, self._stop)
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        return self._fetched

    def _without_small(
        self, pool: ThreadPoolExecutor, reader: ObjectReader, jobs: Sequence[FileToFetch]
    ) -> Sequence[FileToFetch]:
        small = [job for job in jobs if 0 <= job.size <= SMALL_BYTES]
        left = [job for job in jobs if not 0 <= job.size <= SMALL_BYTES]
        if small:
            failed: list[FileToFetch] = []
            # Use a separate thread: the caller may have a running event loop, as notebooks do.
            self._fetched += pool.submit(fetch_small, reader, small, self._meter, failed).result()
            left += failed
        return left

    def close(self) -> None:
        self._stop.set()
        if self._ranges is not None:
            self._ranges.shutdown(wait=True, cancel_futures=True)

    def _do(self, job: FileToFetch) -> None:
        while not self._stop.is_set():
            with self._telling(job):
                partial = claim(job.part, job.size, wait=True)
                # Check now: another process, which has held the lock before, may have fetched the file.
                if job.is_there():
                    if partial is not None:
                        partial.discard()
                    self._meter.add(max(job.size, 0), files=1)
                    return
                if partial is None:
                    continue
                try:
                    self._fill(job, partial)
                    job.place(partial)
                finally:
                    partial.close()
            self._meter.add(0, files=1)
            return

    def _fill(self, job: FileToFetch, partial: Partial) -> None:
        self._meter.add(partial.done_bytes)
        for change in range(_CHANGES):
            try:
                self._fill_gaps(job, partial)
                if job.size >= 0 and partial.held_bytes() != job.size:
                    raise ChangedError(job.path)
                return
            except ChangedError:
                self._meter.add(-partial.done_bytes)
                partial.start_over()
                # Retry with growing pauses: behind a load balancer, the next server may still have the listed version.
                if change == _CHANGES - 1 or self._stop.wait(_FIRST_DELAY_S * 2**change):
                    raise

    def _fill_gaps(self, job: FileToFetch, partial: Partial) -> None:
        if job.size < 0:
            partial.start_over()
            self._read(job, partial, 0, -1)
            return
        gaps = partial.missing()
        if job.size <= SINGLE_BYTES:
            if job.size == 0:
                # An empty file has no bytes to fetch, but the store must confirm that the file is unchanged.
                self._read(job, partial, 0, 0)
            for start, end in gaps:
                self._read(job, partial, start, end)
            return
        pieces = [(at, min(end, at + _RANGE_BYTES)) for start, end in gaps for at in range(start, end, _RANGE_BYTES)]
        with self._guard:
            if self._ranges is None:
                self._ranges = ThreadPoolExecutor(_RANGES_AT_ONCE, thread_name_prefix="paceline-range")
        stop = threading.Event()

        def read(start: int, end: int) -> None:
            if not stop.is_set():
                self._read(job, partial, start, end)

        reads = [self._ranges.submit(read, start, end) for start, end in pieces]
        try:
            _first_error(reads, stop)
        finally:
            # Wait until no thread writes a range: the caller closes the file, whose descriptor may then belong to another file.
            stop.set()
            wait(reads)

    def _read(self, job: FileToFetch, partial: Partial, start: int, end: int) -> None:
        """Read one range into the partial file, with retries after connection errors."""
        position = marked = start
        idle = 0

        def sink(data: bytes) -> None:
            nonlocal position, marked
            if self._stop.is_set():
                raise _StoppedError
            size = len(memoryview(data))
            partial.write(data, position)
            position += size
            self._meter.add(size)
            with self._guard:
                self._fetched += size
            # Record bytes with `mark` after writing them. A kill in between only means that they are fetched again.
            if position - marked >= _MARK_BYTES:
                partial.mark(marked, position)
                marked = position

        for _ in range(_ALL_TRIES):
            before = position
            try:
                # For a whole file the reader needs no range request, and can compare the size.
                whole = position == 0 and end == job.size
                self._reader.read(job.path, position, end, job.version, whole, sink)
                partial.mark(marked, position)
                return
            except Exception as error:
                # Keep the bytes: the next try resumes after them, and so does the next process.
                with contextlib.suppress(OSError):
                    partial.mark(marked, position)
                marked = position
                if isinstance(error, _StoppedError) or cause_of(error) != "transient":
                    raise
                if position == end:
                    return  # all bytes had arrived before the connection broke
                # Without a known size there is no range to request, so start again.
                if end < 0:
                    self._meter.add(before - position)
                    position = marked = before
                idle = 0 if position > before else idle + 1
                # Wait for a random time, so that many nodes whose server has failed do not all send their next request at once.
                delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**idle) * random.uniform(0.5, 1.5)
                if idle >= _TRIES or self._stop.wait(delay):
                    raise
        raise ShortError(f"{job.path!r} broke off {_ALL_TRIES} times")

    @contextlib.contextmanager
    def _telling(self, job: FileToFetch):  # type: ignore[no-untyped-def]
        try:
            yield
        except _StoppedError:
            raise
        except Exception as error:
            own_error = translated(error, self._store.record, self._store.secrets, f"reading {job.path!r}")
            # A full disk is local, so the message does not name the store.
            if cause_of(error) == "disk":
                own_error = _full_disk(job.part.parent, error)
            if own_error is error:
                raise
            raise own_error from error


class _StoppedError(Exception):
    """A download was cancelled, because the download of another file failed."""


def _first_error(futures: Sequence[Future[None]], stop: threading.Event) -> None:
    """Wait for all futures. At the first error, set `stop` and raise the error."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    errors = [error for future in done if (error := future.exception()) is not None]
    # Sort stopped transfers last, because they were stopped after another error, and that error is the one to raise.
    errors.sort(key=lambda error: isinstance(error, _StoppedError))
    if errors:
        stop.set()
        raise errors[0]


def _full_disk(folder: Path, error: BaseException) -> TransferError:
    import shutil

    free = ""
    with contextlib.suppress(OSError):
        free = f", {size_text(shutil.disk_usage(folder).free)} free"
    return TransferError(
        f"there is no room for the files in {str(folder)!r} ({getattr(error, 'strerror', None) or error}{free}). "
        "Make room there, or put the cache elsewhere with PACELINE_DATA_CACHE; what has come so far is kept."
    )


def fetch_small(reader: ObjectReader, jobs: Sequence[FileToFetch], meter: Meter, left: list[FileToFetch]) -> int:
    """Download a batch of small files, and return the number of bytes transferred.

    If a file fails, is locked by another process or has a partial file, append it and all remaining files to `left`.
    """
    return asyncio.run(_fetch(reader, iter(jobs), meter, left))


async def _fetch(reader: ObjectReader, jobs: Iterator[FileToFetch], meter: Meter, left: list[FileToFetch]) -> int:
    counts = await asyncio.gather(*[_take(reader, jobs, meter, left) for _ in range(_AT_ONCE)])
    return sum(counts)


async def _take(reader: ObjectReader, waiting: Iterator[FileToFetch], meter: Meter, left: list[FileToFetch]) -> int:
    """Download files until one fails; append files not downloaded to `left`. Return the byte count."""
    fetched = 0
    # All 32 tasks share one iterator: they run in one thread, and switch only at a download, so no lock is needed.
    for job in waiting:
        # After a failure leave all remaining files to the caller's threads, which retry each file and report the cause.
        if left:
            left.append(job)
            continue
        # Never wait for another process's lock: this thread serves all other downloads.
        try:
            partial = claim(job.part, job.size, wait=False)
        except OSError:
            partial = None
        if partial is None or partial.done_bytes:
            if partial is not None:
                partial.close()
            left.append(job)
            continue
        try:
            fetched += await _one(reader, job, partial, meter)
        except Exception:
            left.append(job)
        finally:
            partial.close()
    return fetched


async def _one(reader: ObjectReader, job: FileToFetch, partial: Partial, meter: Meter) -> int:
    if job.is_there():
        with contextlib.suppress(OSError):
            partial.discard()
        meter.add(job.size, files=1)
        return 0
    data: bytes | memoryview = await reader.get_whole(job.path, job.size, job.version)
    partial.write(data, 0)
    job.place(partial)
    meter.add(job.size, files=1)
    return job.size


def download_files(
    store: Store, infos: Sequence[FileInfo], target: Path, *, overwrite: bool, progress: Progress | None
) -> int:
    """Download files of a store to the folder `target`.

    Return the number of files. A second call resumes an interrupted download.

    Raises:
        DataError: The path of a file is also a folder of other files.
        TransferError: The disk is full, or a file can't be read.
    """
    names = {path_in_store(info): info for info in infos}
    for name in names:
        check_relative(name, store.title)
    check_tree(names, store.title)
    wanted = [(name, info) for name, info in names.items() if overwrite or not (target / name).exists()]
    meter = Meter(progress, sum(max(info.size, 0) for _, info in wanted), len(wanted))
    try:
        target.mkdir(parents=True, exist_ok=True)
        # Resolve links before comparing: a link inside the folder may lead anywhere.
        top = os.path.realpath(target)
        for name, _ in wanted:
            folder = (target / name).parent
            folder.mkdir(parents=True, exist_ok=True)
            if not f"{os.path.realpath(folder)}/".startswith(f"{top.rstrip('/')}/"):
                raise TransferError(
                    f"{name!r} of {store.title} would be written outside {str(target)!r}, because {str(folder)!r} is a link "
                    "that leads out of it. Remove the link, or name another folder."
                )
    except OSError as error:
        raise TransferError(
            f"{str(error.filename or target)!r} can't be created: {error.strerror}. Fix that and try again."
        ) from error
    # Give the file the usual mode of the user's files, because a partial file is private to the user.
    mode = 0o666 & ~_umask()
    transfer(store, [_job(target / name, name, info, mode) for name, info in wanted], meter)
    meter.finish()
    return len(wanted)


def _job(target: Path, name: str, info: FileInfo, mode: int) -> FileToFetch:
    # The name has a hash of the version: bytes of another version can't be resumed.
    sign = hashlib.sha256(f"{target.name}\0{info.size}\0{info.version}".encode("utf-8", "surrogateescape")).hexdigest()[
        :32
    ]

    def place(partial: Partial) -> None:
        partial.finish(target, mode=mode, mtime_ns=None)

    part = target.with_name(f".paceline-{sign}.part")
    return FileToFetch(path=name, size=info.size, version=info.version, part=part, place=place, is_there=lambda: False)


def _umask() -> int:
    # The umask can only be read by setting it. Set a strict one, so that files of other threads are never too open.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
