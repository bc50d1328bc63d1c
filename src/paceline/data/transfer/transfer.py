"""Files from a store to this machine: many at once, large ones in ranges, tried again, resumed, never taken for whole
before they are.

    job -> a lock on its .part -> what is missing of it, from the reader -> its size -> renamed to its place

One thread works on one small file at a time, so no thread waits for a lock while it holds another.
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
from typing import TYPE_CHECKING, Any

from paceline.data.stores.failures import ChangedError, ShortError, cause_of, translated
from paceline.data.stores.filesystem import Store
from paceline.data.stores.names import check_relative, check_tree
from paceline.data.transfer.listing import FileInfo, path_in_store
from paceline.data.transfer.partial import SINGLE_BYTES, FileToFetch, Partial, claim
from paceline.data.transfer.progress import Meter, Progress, size_text
from paceline.data.transfer.reading import ObjectReader, Reader, reader_of
from paceline.errors import TransferError

if TYPE_CHECKING:
    from paceline.data.transfer.reading import ObjectReader


#: Files at once; ranges of large files at once. Guesses that were best of several on a loopback server and two cores.
_FILES_AT_ONCE = 16
_RANGES_AT_ONCE = 8
_RANGE_BYTES = 16 << 20
#: What a kill may lose of each range.
_MARK_BYTES = 4 << 20
#: Tries without a byte of progress, and in all, of one range.
_TRIES = 5
_ALL_TRIES = 50
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
#: An object that changes while it is read is read anew so many times.
_CHANGES = 3

#: Larger ones are streamed, and resumed where they break off.
SMALL_BYTES = 1 << 20
_AT_ONCE = 32


def transfer(store: Store, jobs: Sequence[FileToFetch], meter: Meter) -> int:
    """Fetch these files; how many bytes came over the line.

    Raises:
        DataError, TransferError: the first file that can't be fetched; the others are given up, what has come is kept.
    """
    if not jobs:
        return 0
    with store.telling("opening it"):
        reader = reader_of(store)
    work = _Work(store, reader, meter)
    try:
        return work.run(jobs)
    finally:
        work.close()


class _Work:
    def __init__(self, store: Store, reader: Reader, meter: Meter) -> None:
        self._store, self._reader, self._meter = store, reader, meter
        #: Set at the first error and at the end. Each write looks at it, so what others fetch ends with their next piece.
        self._stop = threading.Event()
        self._fetched = 0
        #: Guards `_fetched`, and the making of `_ranges`.
        self._guard = threading.Lock()
        # A second pool: threads of the first wait for ranges, and would wait for ever if these stood behind them in one pool.
        # A range submits nothing itself.
        self._ranges: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[FileToFetch]) -> int:
        pool = ThreadPoolExecutor(min(_FILES_AT_ONCE, len(jobs)), thread_name_prefix="paceline-fetch")
        try:
            if isinstance(self._reader, ObjectReader):
                jobs = self._without_small(pool, self._reader, jobs)
            # Large ones first, so that the end is not one large file alone.
            waiting = [pool.submit(self._do, job) for job in sorted(jobs, key=lambda job: -job.size)]
            _first_error(waiting, self._stop)
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        return self._fetched

    def _without_small(
        self, pool: ThreadPoolExecutor, reader: ObjectReader, jobs: Sequence[FileToFetch]
    ) -> Sequence[FileToFetch]:
        """The jobs that remain when the small ones that go well at once are done."""
        small = [job for job in jobs if 0 <= job.size <= SMALL_BYTES]
        left = [job for job in jobs if not 0 <= job.size <= SMALL_BYTES]
        if small:
            failed: list[FileToFetch] = []
            # In a thread of its own: the caller may have an event loop running, as notebooks do.
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
                # Looked at under the lock, or after another has given it up: that one may have fetched the file.
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
                # The version is the one that was listed; it comes back only where a server wavers between two.
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
                # Nothing will come, but the store has to say that the file is still the one that was listed.
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
            # Until none of them writes any more: the caller closes the file, and its number goes to another.
            stop.set()
            wait(reads)

    def _read(self, job: FileToFetch, partial: Partial, start: int, end: int) -> None:
        """Fetch one range, again and again from where it broke off as long as that helps."""
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
            # Marked after it is written, so a kill in between only means that these bytes come again.
            if position - marked >= _MARK_BYTES:
                partial.mark(marked, position)
                marked = position

        for _ in range(_ALL_TRIES):
            before = position
            try:
                # Then the reader need not ask for a range, and can compare the size of the object.
                whole = position == 0 and end == job.size
                self._reader.read(job.path, position, end, job.version, whole, sink)
                partial.mark(marked, position)
                return
            except Exception as error:
                # What has come stays: the next try goes on behind it, and so does the next process.
                with contextlib.suppress(OSError):
                    partial.mark(marked, position)
                marked = position
                if isinstance(error, _StoppedError) or cause_of(error) != "transient":
                    raise
                if position == end:
                    return  # all had come before the line broke
                # Of unknown length: there is no end to ask for a range up to, so it comes from the front again.
                if end < 0:
                    self._meter.add(before - position)
                    position = marked = before
                idle = 0 if position > before else idle + 1
                # Spread by chance: many nodes that lost the same server must not come back all at once.
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
            told = translated(error, self._store.record, self._store.secrets, f"reading {job.path!r}")
            # A full disk is this machine's, so nothing of the store stands in the message.
            if cause_of(error) == "disk":
                told = _full_disk(job.part.parent, error)
            if told is error:
                raise
            raise told from error


class _StoppedError(Exception):
    """Another file has failed, so this one is given up."""


def _first_error(futures: Sequence[Future[None]], stop: threading.Event) -> None:
    """Wait for all; at the first error, stop the others and raise it."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    errors = [error for future in done if (error := future.exception()) is not None]
    # Those that were stopped because of another's error tell nothing.
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
    """Fetch a batch and return how many bytes came.

    left: gets the jobs that are still to be done: those that failed in any way, that another process is fetching, or of
        which something has come before.
    """
    return asyncio.run(_fetch(reader, iter(jobs), meter, left))


async def _fetch(reader: ObjectReader, jobs: Iterator[FileToFetch], meter: Meter, left: list[FileToFetch]) -> int:
    counts = await asyncio.gather(*[_take(reader, jobs, meter, left) for _ in range(_AT_ONCE)])
    return sum(counts)


async def _take(reader: ObjectReader, waiting: Iterator[FileToFetch], meter: Meter, left: list[FileToFetch]) -> int:
    """Fetch one after the other, as long as there are any and none has failed."""
    fetched = 0
    # All 32 take from one iterator: they run in one thread, and change only where they wait for a download.
    for job in waiting:
        # After a failure the threads try again, slower; they also find out what is wrong.
        if left:
            left.append(job)
            continue
        # Never waits for another process's lock: this thread has all the other downloads to go on with.
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
    data: Any = await reader.get_whole(job.path, job.size, job.version)
    partial.write(data, 0)
    job.place(partial)
    meter.add(job.size, files=1)
    return job.size


def download_files(
    store: Store, infos: Sequence[FileInfo], target: Path, *, overwrite: bool, progress: Progress | None
) -> int:
    """Copy files to `target`, under their paths in the store; returns how many.

    Each grows under a name of its own beside its place, so another try goes on with it.

    Raises:
        DataError: names that can't lie in a folder. TransferError: no room, or a file that can't be read.
    """
    names = {path_in_store(info): info for info in infos}
    for name in names:
        check_relative(name, store.title)
    check_tree(names, store.title)
    wanted = [(name, info) for name, info in names.items() if overwrite or not (target / name).exists()]
    meter = Meter(progress, sum(max(info.size, 0) for _, info in wanted), len(wanted))
    try:
        target.mkdir(parents=True, exist_ok=True)
        # Without links, to compare with: a link inside the folder may lead anywhere.
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
        raise TransferError(f"{str(error.filename or target)!r} can't be made: {error.strerror}. Mend that.") from error
    # As other programs of the user make files. Until it is whole, a file is the user's alone.
    mode = 0o666 & ~_umask()
    transfer(store, [_job(target / name, name, info, mode) for name, info in wanted], meter)
    meter.finish()
    return len(wanted)


def _job(target: Path, name: str, info: FileInfo, mode: int) -> FileToFetch:
    # Of this version: what came of another one is no beginning of this.
    sign = hashlib.sha256(f"{target.name}\0{info.size}\0{info.version}".encode("utf-8", "surrogateescape")).hexdigest()[
        :32
    ]

    def place(partial: Partial) -> None:
        partial.finish(target, mode=mode, mtime_ns=None)

    part = target.with_name(f".paceline-{sign}.part")
    return FileToFetch(path=name, size=info.size, version=info.version, part=part, place=place, is_there=lambda: False)


def _umask() -> int:
    # No call only reads the mask. For this moment other threads make files that are more private than asked for, never less.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
