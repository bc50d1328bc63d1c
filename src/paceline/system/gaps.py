"""Limit the size of a log by cutting out its middle.

A worker writes directly to its log, so no process in between can limit the log. Instead, Paceline frees disk blocks in
the middle of the log while the worker writes (fallocate(2), FALLOC_FL_PUNCH_HOLE). The other bytes keep their offsets:

    0      begin                  end        size
    [ first ][ mark    hole      ][ last    ]          rank_3.log, and beside it
                                                    gap_3.json: {"begin", "end", "limit", "size"}, written before the hole

So the offsets of readers, and of copies of the log on other machines, stay valid. Readers skip the gap. After the
worker has ended, `close` replaces the log by a shorter file.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

#: Default limit of a log in bytes.
DEFAULT_LIMIT = 2_000_000_000
LEAST_LIMIT = 1 << 16  # minimum limit of a log in bytes, with room for an error's traceback
#: Maximum number of bytes in which to search for the end of a line.
_LINE_BYTES = 1 << 13
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_CHUNK = 1 << 20


class Gap(NamedTuple):
    """The removed bytes of a log, from offset `begin` to `end`.

    is_closed: Whether a shorter file without a hole has replaced the log.
    """

    begin: int
    end: int
    limit: int
    is_closed: bool = False

    def mark(self, since: int | None = None) -> bytes:
        """Return the line that readers of the log see instead of the gap.

        since: The offset of a reader that had read some bytes of the gap before they were cut; None for other readers.
        """
        return (
            f"-- {self.end - (self.begin if since is None else since):,} bytes are left out here: "
            f"the log has grown beyond its limit of {self.limit:,} bytes (log_limit) --\n"
        ).encode()

    def place(self, offset: int) -> int:
        """Convert a byte's offset in the uncut log to its offset in the shorter file."""
        if offset <= self.begin:
            return offset
        return max(offset - self.end, 0) + self.begin + len(self.mark())


def path_of(log: str) -> str:
    """Return the file that describes a log's gap: `gap_3.json` for `rank_3.log`."""
    folder, name = os.path.split(log)
    return os.path.join(folder, name.replace("rank_", "gap_", 1).removesuffix(".log") + ".json")


def log_of(path: str) -> str | None:
    """Return the log whose gap this file describes, None for other files."""
    folder, name = os.path.split(path)
    if not (name.startswith("gap_") and name.endswith(".json")):
        return None
    return os.path.join(folder, name.replace("gap_", "rank_", 1).removesuffix(".json") + ".log")


def read(log: str) -> Gap | None:
    """Return the gap (removed bytes) of a log, or None without a gap."""
    try:
        with open(path_of(log), encoding="utf-8") as file:
            told: dict[str, Any] = json.load(file)
        # A gap's description has the size of the shortened log. A larger log has not been replaced by it yet.
        is_closed = told.get("size") is not None and os.stat(log).st_size <= told["size"]
        return Gap(int(told["begin"]), int(told["end"]), int(told["limit"]), is_closed)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def pieces(log: str, offset: int = 0) -> Iterator[bytes]:
    """Yield a log's bytes from an offset on, with a marker line for cut bytes.

    Raises:
        FileNotFoundError: The log does not exist.
    """
    ends_line = True
    with open(log, "rb", buffering=0) as file:
        while True:
            gap, stop = _gap_of(log, file.fileno()), _CHUNK
            if gap is not None and not gap.is_closed and offset < gap.end:
                if offset >= gap.begin:
                    yield (b"" if ends_line else b"\n") + gap.mark(offset)
                    offset, ends_line = gap.end, True
                    continue
                stop = min(stop, gap.begin - offset)
            data = os.pread(file.fileno(), stop, offset)
            if not data:
                return
            if _gap_of(log, file.fileno()) != gap:
                continue  # the file may have been cut during the read
            offset, ends_line = offset + len(data), data.endswith(b"\n")
            yield data


class Keeper:
    """A limiter that keeps a log within `limit` bytes while a worker writes it."""

    def __init__(self, log: str, limit: int) -> None:
        self._log, self._limit = log, limit
        self._gap: Gap | None = None
        self._seen = 0
        #: Error of a file system that can't punch holes; then no further cut is tried. None without an error.
        self.trouble: str | None = None

    def look(self) -> None:
        """Cut more out of the log if it exceeds its limit.

        Call this periodically. The bytes up to a quarter of the limit stay before the gap, the newest bytes after it.
        """
        if self.trouble is not None:
            return
        try:
            size = os.stat(self._log).st_size
        except OSError:
            return
        if size <= self._limit or size == self._seen:
            return
        self._seen = size
        gap = self._gap or read(self._log)
        try:
            with open(self._log, "r+b", buffering=0) as file:
                begin = gap.begin if gap else _after_line(file.fileno(), self._limit // 4 - _LINE_BYTES)
                if size - (gap.end if gap else begin) <= self._limit - begin:
                    return
                self._gap = Gap(begin, _after_line(file.fileno(), size - self._limit // 2), self._limit)
                # Write the description before punching the hole: readers that find zeros need the description.
                _write(self._log, self._gap)
                _punch(file.fileno(), self._gap)
                # Write the line that marks the gap into the log too, for tools that read the log directly.
                os.pwrite(file.fileno(), self._gap.mark(), begin)
        # AttributeError: the C library has no fallocate, as on macOS.
        except (OSError, AttributeError) as error:
            if gap is None:
                _unlink(path_of(self._log))
            # A full disk may have space later, but a file system without support for holes never gets it.
            if getattr(error, "errno", None) != errno.ENOSPC:
                self.trouble = getattr(error, "strerror", None) or str(error)


def _gap_of(log: str, fd: int) -> Gap | None:
    gap = read(log)
    if gap is not None and gap.is_closed and os.stat(log).st_ino != os.fstat(fd).st_ino:
        return gap._replace(is_closed=False)
    return gap


def apply(path: str) -> None:
    """Remove from a log's copy the bytes that the gap file `path` describes."""
    log = log_of(path)
    gap = read(log) if log is not None else None
    if log is None or gap is None or gap.is_closed:
        return
    try:
        with open(log, "r+b", buffering=0) as file:
            _punch(file.fileno(), gap)
            os.pwrite(file.fileno(), gap.mark(), gap.begin)
    except (OSError, AttributeError):
        pass  # keep the bytes: the log is missing, or its file system can't punch holes


def close(log: str) -> Gap | None:
    """Replace a log by a shorter file after its last write.

    Return the log's gap, or None if there is no gap or the shorter file does not fit on the disk.
    """
    gap = read(log)
    if gap is None or gap.is_closed:
        return None
    beside = f"{log}.short"
    try:
        with open(log, "rb", buffering=0) as source, open(beside, "wb", buffering=0) as made:
            _copy(source.fileno(), made.fileno(), 0, gap.begin)
            made.write(gap.mark())
            _copy(source.fileno(), made.fileno(), gap.end, os.fstat(source.fileno()).st_size)
            size = made.tell()
        # First write the shortened log's size into the description: readers compare it with the size of the log.
        _write(log, gap, size=size)
        os.replace(beside, log)
    except OSError:
        _unlink(beside)
        return None
    return gap._replace(is_closed=True)


def _after_line(fd: int, offset: int) -> int:
    offset = max(offset, 0)
    end = os.pread(fd, _LINE_BYTES, offset).find(b"\n")
    return offset + end + 1 if end >= 0 else offset


def _punch(fd: int, gap: Gap) -> None:
    import ctypes

    # Use ctypes, since Python's posix_fallocate takes no flags. File systems without holes fail without a change.
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(gap.begin), ctypes.c_int64(gap.end - gap.begin))
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _copy(source: int, target: int, begin: int, end: int) -> None:
    while begin < end and (data := os.pread(source, min(_CHUNK, end - begin), begin)):
        begin += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]


def _write(log: str, gap: Gap, *, size: int | None = None) -> None:
    # Write to another file and rename it: readers see the old or the new file.
    beside = f"{path_of(log)}.new"
    with open(beside, "w", encoding="utf-8") as file:
        json.dump({"begin": gap.begin, "end": gap.end, "limit": gap.limit, "size": size}, file)
    os.replace(beside, path_of(log))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
