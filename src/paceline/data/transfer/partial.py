"""Partial files: written beside their destination, locked, resumable, renamed when complete.

    <name>.part      the bytes; the process that holds its flock downloads, and other processes wait for the lock
    <name>.ranges    for a file downloaded in several ranges: a line "start end" for each range, appended after its bytes
                     are written

A file downloaded in one piece has no .ranges, because the length of its .part is its progress. A killed process leaves both
files behind, and the next process resumes the download.
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

from paceline.system.files import is_at

#: Size in bytes above which a file is fetched in several concurrent ranges.
SINGLE_BYTES = 32 << 20


class Partial:
    """A partial file, locked until `close` or `finish`. `claim` creates it.

    Args:
        path: Path of the .part file.
        fd: The file, open and locked.
        size: Bytes of the whole file, or -1 if unknown.
        held: Number of bytes that the file has when it is locked.
    """

    def __init__(self, path: Path, fd: int, size: int, held: int) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self._ranges = path.with_suffix(".ranges") if size > SINGLE_BYTES else None
        #: Guards `_done` and the file of finished ranges, which several threads change. `pwrite` needs no lock.
        self._guard = threading.Lock()
        self._journal: int | None = None
        self._done = self._read_ranges() if held else []
        if self._ranges is None and 0 < held <= size:
            self._done = [(0, held)]
        # Discard bytes without a record of their range, or beyond the file's size.
        if not self._done and (held or self._ranges is not None):
            self.start_over()

    def missing(self) -> list[tuple[int, int]]:
        """Return (start, end) of each range of bytes not yet downloaded."""
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
        """Discard all downloaded bytes of the partial file."""
        # Remove the .ranges file first: if this process is killed in between, no range of discarded bytes must remain.
        self._unlink_ranges()
        self._close_journal()
        os.ftruncate(self._fd, 0)
        self._done = []

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write downloaded bytes at their offset in the partial file."""
        view = memoryview(data)
        while view:
            # On an almost full disk, `pwrite` writes only a part of the data, and fails at the next call.
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def mark(self, start: int, end: int) -> None:
        """Record that the bytes start .. end - 1 are in the partial file."""
        if end <= start:
            return
        with self._guard:
            self._done.append((start, end))
            if self._ranges is None:
                return
            if self._journal is None:
                self._journal = os.open(self._ranges, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            # Write each line with one call: a kill can then truncate only the last line, which is ignored on reading.
            os.write(self._journal, f"{start} {end}\n".encode())

    def held_bytes(self) -> int:
        """Return the current length of the partial file in bytes."""
        return os.fstat(self._fd).st_size

    def finish(self, target: str | Path, *, mode: int, mtime_ns: int | None) -> None:
        """Rename the complete file to `target`. mtime_ns: its modification time; None keeps it."""
        os.fchmod(self._fd, mode)
        if mtime_ns is not None:
            os.utime(self._fd, ns=(time.time_ns(), mtime_ns))
        # Remove the .ranges file before the rename, because it would be wrong for the next .part file of this name.
        self._unlink_ranges()
        os.replace(self.path, target)
        self.close()

    def discard(self) -> None:
        """Delete the partial file and release its lock."""
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
    """Lock and return the partial file at `path`, which ends in .part.

    If another process has the lock, return None: immediately without `wait`, else when that process releases the lock.
    If that process has then not completed the download, the caller should call `claim` again.
    """
    while True:
        # O_NOFOLLOW: other users may have write access to the folder, and could replace this file by a link.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    return None
                # The process that held the lock has renamed the file or failed. The caller checks which, and calls again.
                fcntl.flock(fd, fcntl.LOCK_EX)
                return None
            # Another process may have finished or removed the file during the wait.
            if is_at(path, fd):
                # `Partial` closes the file from now on. Set `fd` to -1, so that the block below does not close it.
                partial, fd = Partial(path, fd, size, os.fstat(fd).st_size), -1
                return partial
        finally:
            if fd >= 0:
                os.close(fd)


@dataclass(frozen=True, kw_only=True)
class FileToFetch:
    """A file to download.

    Attributes:
        path, size, version: The file's path, size in bytes and version in the store.
        part: Path of the partial file.
        place: Called with the complete partial file, to move it to its destination.
        is_there: Returns whether another process has completed the file. Called while the partial file is locked.
    """

    path: str
    size: int
    version: str
    part: Path
    place: Callable[[Partial], None]
    is_there: Callable[[], bool]
