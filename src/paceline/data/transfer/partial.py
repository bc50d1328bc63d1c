"""Partial files: written beside their destination, locked, resumable, renamed when whole.

    <name>.part      the bytes; flock: the holder fetches, others wait for it
    <name>.ranges    of a file fetched in several ranges: "start end" of each written range, one a line, appended after
                     the bytes are written

A file fetched in one piece needs no .ranges: the length of its .part is its progress. A killed process leaves both behind, and
the next one resumes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.system import locks
from paceline.system.files import is_at

#: Larger files are fetched in several concurrent ranges.
SINGLE_BYTES = 32 << 20


class Partial:
    """A partial file, locked until `close` or `finish`. Create it with `claim`.

    size: bytes of the whole file, -1 if unknown. held: bytes that the partial file has now.
    """

    def __init__(self, path: Path, fd: int, size: int, held: int) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self._ranges = path.with_suffix(".ranges") if size > SINGLE_BYTES else None
        #: Guards `_done` and the journal, which several threads mark. `pwrite` needs no lock: it has no shared position.
        self._guard = threading.Lock()
        self._journal: int | None = None
        self._done = self._read_ranges() if held else []
        if self._ranges is None and 0 < held <= size:
            self._done = [(0, held)]
        # Bytes without a record of their range, or beyond the file's size, are useless.
        if not self._done and (held or self._ranges is not None):
            self.start_over()

    def missing(self) -> list[tuple[int, int]]:
        """Return the (start, end) of each gap, in order."""
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
        """Discard all bytes: the file in the store has changed."""
        # Remove the journal first, so that after a kill it does not list bytes that were discarded.
        self._unlink_ranges()
        self._close_journal()
        os.ftruncate(self._fd, 0)
        self._done = []

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write bytes at their offset in the file."""
        view = memoryview(data)
        while view:
            # An almost full disk writes a part, and fails only at the next call.
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def mark(self, start: int, end: int) -> None:
        """Record that these bytes are written."""
        if end <= start:
            return
        with self._guard:
            self._done.append((start, end))
            if self._ranges is None:
                return
            if self._journal is None:
                self._journal = os.open(self._ranges, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            # One write per line: a kill can truncate only the last line, which is ignored on reading.
            os.write(self._journal, f"{start} {end}\n".encode())

    def held_bytes(self) -> int:
        """Return the number of bytes written."""
        return os.fstat(self._fd).st_size

    def finish(self, target: str | Path, *, mode: int, mtime_ns: int | None) -> None:
        """Rename the whole file to `target`, and set its times."""
        os.fchmod(self._fd, mode)
        if mtime_ns is not None:
            os.utime(self._fd, ns=(time.time_ns(), mtime_ns))
        # Remove the .ranges file first, because it would be wrong beside another .part file.
        self._unlink_ranges()
        os.replace(self.path, target)
        self.close()

    def discard(self) -> None:
        """Delete the partial file."""
        with contextlib.suppress(OSError):
            self._unlink_ranges()
            self.path.unlink()
        self.close()

    def close(self) -> None:
        """Release the partial file's lock."""
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
            self._ranges.unlink(missing_ok=True)

    def _read_ranges(self) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        if self._ranges is None:
            return ranges
        with contextlib.suppress(OSError):
            # A truncated last line has no line end.
            for line in self._ranges.read_bytes().split(b"\n")[:-1]:
                if (words := re.fullmatch(rb"(\d+) (\d+)", line)) and int(words[1]) < int(words[2]) <= self.size:
                    ranges.append((int(words[1]), int(words[2])))
        return ranges


def claim(path: Path, size: int, *, wait: bool) -> Partial | None:
    """Lock the partial file at `path`, which ends in .part.

    Return None if another process has it and `wait` is False, or if that process has released it. The caller then checks
    whether there is still something to fetch.
    """
    while True:
        # NOFOLLOW: a download may go to a folder where others can plant a link of that name.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    return None
                # The other process has renamed the file or failed. The caller checks, and calls again.
                fcntl.flock(fd, fcntl.LOCK_EX)
                return None
            # Another process may have finished or removed it during the wait.
            if is_at(path, fd):
                # `Partial` owns the open file now; -1 keeps the block below from closing it.
                partial, fd = Partial(path, fd, size, os.fstat(fd).st_size), -1
                return partial
        finally:
            if fd >= 0:
                os.close(fd)


def is_claimed(path: Path) -> bool:
    """Return whether a process is fetching this file now."""
    return locks.is_held(path)


@dataclass(frozen=True, kw_only=True)
class FileToFetch:
    """A file to fetch.

    Attributes:
        path, size, version: In the store.
        part: Path of the partial file.
        place: Called to move the whole file to its destination.
        is_there: Whether another process has finished the file; called with the lock held.
    """

    path: str
    size: int
    version: str
    part: Path
    place: Callable[[Partial], None]
    is_there: Callable[[], bool]
