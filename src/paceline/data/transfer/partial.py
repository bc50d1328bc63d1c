"""A file while it is fetched: written beside its place, locked, resumable, renamed when it is whole.

    <name>.part      what has come; flock: whoever holds it fetches, others wait for the same file
    <name>.ranges    of a file that comes in several ranges: "start end" of what lies in the .part, one a line, appended
                     after the bytes are written

A file that comes in one piece needs no .ranges: the length of its .part says how far it is. Both are left behind by a
process that is killed, and the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.system import locks

#: Larger files come in several ranges at once.
SINGLE_BYTES = 32 << 20


class Partial:
    """A file that is being fetched, locked by this object until `close` or `finish`. Make it with `claim`.

    size: of the whole file; -1 where the store does not tell. held: the bytes that the file has now.
    """

    def __init__(self, path: Path, fd: int, size: int, held: int) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self._ranges = path.with_suffix(".ranges") if size > SINGLE_BYTES else None
        #: Guards `_done` and the journal: several ranges of one file are marked by as many threads. Bytes need no lock, for
        #: `pwrite` has no common position.
        self._guard = threading.Lock()
        self._journal: int | None = None
        self._done = self._read_ranges() if held else []
        if self._ranges is None and 0 < held <= size:
            self._done = [(0, held)]
        # Bytes of which no record says where they belong, or more than the file has, are worth nothing.
        if not self._done and (held or self._ranges is not None):
            self.start_over()

    def missing(self) -> list[tuple[int, int]]:
        """(start, end) of the gaps, in order."""
        gaps, position = [], 0
        for start, end in sorted(self._done):
            if start > position:
                gaps.append((position, start))
            position = max(position, end)
        if position < self.size:
            gaps.append((position, self.size))
        return gaps

    @property
    def done_bytes(self) -> int:
        return max(self.size, 0) - sum(end - start for start, end in self.missing())

    def start_over(self) -> None:
        """Forget what has come: the file in the store is another one now."""
        # First the journal: if this is killed in between, it must not speak of bytes that are gone.
        self._unlink_ranges()
        self._close_journal()
        os.ftruncate(self._fd, 0)
        self._done = []

    def write(self, data: bytes, offset: int) -> None:
        """Put bytes in their place. Without ranges, they must be written from the front."""
        view = memoryview(data)
        while view:
            # A disk that is almost full takes a part, and says so only at the next call.
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def mark(self, start: int, end: int) -> None:
        """Remember that these bytes are written."""
        if end <= start:
            return
        with self._guard:
            self._done.append((start, end))
            if self._ranges is None:
                return
            if self._journal is None:
                self._journal = os.open(self._ranges, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            # One write of one line, to the end: what a kill cuts short is the last line alone, and that is left out when read.
            os.write(self._journal, f"{start} {end}\n".encode())

    def held_bytes(self) -> int:
        """The number of bytes that the file has now."""
        return os.fstat(self._fd).st_size

    def finish(self, target: str | Path, *, mode: int, mtime_ns: int | None) -> None:
        """Give the whole file its name. Its times are set where `mtime_ns` is given."""
        os.fchmod(self._fd, mode)
        if mtime_ns is not None:
            os.utime(self._fd, ns=(time.time_ns(), mtime_ns))
        # First the ranges: beside another .part they would lie about it.
        self._unlink_ranges()
        os.replace(self.path, target)
        self.close()

    def discard(self) -> None:
        """Remove what has come."""
        with contextlib.suppress(OSError):
            self._unlink_ranges()
            self.path.unlink()
        self.close()

    def close(self) -> None:
        """Let others go on with it."""
        self._close_journal()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _close_journal(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    def _unlink_ranges(self) -> None:
        if self._ranges is not None:
            with contextlib.suppress(FileNotFoundError):
                self._ranges.unlink()

    def _read_ranges(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        if self._ranges is None:
            return found
        with contextlib.suppress(OSError):
            # A last line that a kill cut short has no line end.
            for line in self._ranges.read_bytes().split(b"\n")[:-1]:
                words = line.split()
                if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
                    start, end = int(words[0]), int(words[1])
                    if 0 <= start < end <= self.size:
                        found.append((start, end))
        return found


def claim(path: Path, size: int, *, wait: bool) -> Partial | None:
    """The file at `path` (its name ends in .part), locked; None where another has it and `wait` is False, or had it.

    Waiting ends when the other has finished, given up or died; then the caller looks again whether there is still
    something to fetch.
    """
    while True:
        # NOFOLLOW: a download grows beside its place, in a folder where others may have put a link of that name.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    return None
                # The other one has let go: it has renamed the file, or has failed. The caller looks which, and comes again.
                fcntl.flock(fd, fcntl.LOCK_EX)
                return None
            status = os.fstat(fd)
            if _is_still(status, path):
                # The open file is the object's from here on; -1 keeps the block below from closing it.
                partial, fd = Partial(path, fd, size, status.st_size), -1
                return partial
        finally:
            if fd >= 0:
                os.close(fd)


def is_claimed(path: Path) -> bool:
    """True if somebody is fetching this file now."""
    return locks.is_held(path)


def _is_still(status: os.stat_result, path: Path) -> bool:
    """True if the open file is the one of that name; another may have finished or removed it while we waited."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == (status.st_dev, status.st_ino)


@dataclass(frozen=True, kw_only=True)
class FileToFetch:
    """A file to fetch. path, size, version: in the store. part: where it grows. place: gives the whole file its name.

    is_there: whether somebody else has finished it; asked once its lock is had.
    """

    path: str
    size: int
    version: str
    part: Path
    place: Callable[[Partial], None]
    is_there: Callable[[], bool]
