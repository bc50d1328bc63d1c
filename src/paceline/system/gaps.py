"""Leaves out the middle of a log that has grown beyond its limit.

A worker writes straight into its log, so nobody stands between who could stop it. Instead the blocks in the middle are
given back to the file system while it writes (fallocate(2), FALLOC_FL_PUNCH_HOLE), which moves no byte that stays:

    0      begin                  end        size
    [ first ][ mark    hole      ][ last    ]          rank_3.log, and beside it
                                                    gap_3.json: {"begin", "end", "limit", "size"}, written before the hole

So readers, and the copies of a log on other machines, keep their offsets; they pass over what the gap says. Once nobody
writes any more, a file takes the log's place that is as short as what is left of it (`close`).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

#: A log's limit: what is kept of it, in bytes. 0 for none; less than the least would not hold an error's traceback.
DEFAULT_LIMIT = 2_000_000_000
LEAST_LIMIT = 1 << 16
#: How far to look for a line's end.
_LINE_BYTES = 1 << 13
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_CHUNK = 1 << 20


class Gap(NamedTuple):
    """begin, end: of what is left out. is_closed: the file was made shorter, and nothing is left out of it as it is now."""

    begin: int
    end: int
    limit: int
    is_closed: bool = False

    def mark(self, since: int | None = None) -> bytes:
        """The line that stands for what is left out. since: where a reader is that has had some of it."""
        return (
            f"-- {self.end - (self.begin if since is None else since):,} bytes are left out here: "
            f"the log has grown beyond its limit of {self.limit:,} bytes (log_limit) --\n"
        ).encode()

    def place(self, offset: int) -> int:
        """The offset in the short file of what was written at this offset of the long one."""
        if offset <= self.begin:
            return offset
        return max(offset - self.end, 0) + self.begin + len(self.mark())


def path_of(log: str) -> str:
    """The file that tells of a log's gap: `gap_3.json` beside `rank_3.log`, before which it is sent to other machines."""
    folder, name = os.path.split(log)
    return os.path.join(folder, name.replace("rank_", "gap_", 1).removesuffix(".log") + ".json")


def log_of(path: str) -> str | None:
    """The log whose gap is told in this file; None where it is no such file."""
    folder, name = os.path.split(path)
    if not (name.startswith("gap_") and name.endswith(".json")):
        return None
    return os.path.join(folder, name.replace("gap_", "rank_", 1).removesuffix(".json") + ".log")


def read(log: str) -> Gap | None:
    """The gap of a log; None where nothing is left out."""
    try:
        with open(path_of(log), encoding="utf-8") as file:
            told: dict[str, Any] = json.load(file)
        # Told before the short file takes the long one's place, which is larger.
        is_closed = told.get("size") is not None and os.stat(log).st_size <= told["size"]
        return Gap(int(told["begin"]), int(told["end"]), int(told["limit"]), is_closed)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def pieces(log: str, offset: int = 0) -> Iterator[bytes]:
    """The bytes that there are of a log from this offset on, with the line in the place of what is left out.

    Raises:
        FileNotFoundError: there is no such log.
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
                continue  # it may have been left out while it was read
            offset, ends_line = offset + len(data), data.endswith(b"\n")
            yield data


class Keeper:
    """Keeps one log, of which `limit` bytes are kept, within it. For the machine on which it is written, or one that sees
    the same folder.
    """

    def __init__(self, log: str, limit: int) -> None:
        self._log, self._limit = log, limit
        self._gap: Gap | None = None
        self._seen = 0
        #: Why the file system can't do it; nothing is tried any more then.
        self.trouble: str | None = None

    def look(self) -> None:
        """Leave out more, if it is time to. A quarter of the limit is kept of the beginning, a half to three quarters of
        the end, and what is written between two calls.
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
                # First the note, then the hole: a reader who meets the hole's zeros must find out what they stand for.
                _write(self._log, self._gap)
                _punch(file.fileno(), self._gap)
                # Who reads the file as it is finds the line too.
                os.pwrite(file.fileno(), self._gap.mark(), begin)
        # AttributeError: the C library has no fallocate, on macOS say.
        except (OSError, AttributeError) as error:
            if gap is None:
                _unlink(path_of(self._log))
            # A full disk may have room again; that a file system has no holes stays so.
            if getattr(error, "errno", None) != errno.ENOSPC:
                self.trouble = getattr(error, "strerror", None) or str(error)


def _gap_of(log: str, fd: int) -> Gap | None:
    """The gap of a log as it is in this file, in whose place the short one may have come."""
    gap = read(log)
    if gap is not None and gap.is_closed and os.stat(log).st_ino != os.fstat(fd).st_ino:
        return gap._replace(is_closed=False)
    return gap


def apply(path: str) -> None:
    """Give back here what is left out by a gap that has come from another machine, of which `path` tells."""
    log = log_of(path)
    gap = read(log) if log is not None else None
    if log is None or gap is None or gap.is_closed:
        return
    try:
        with open(log, "r+b", buffering=0) as file:
            _punch(file.fileno(), gap)
            os.pwrite(file.fileno(), gap.mark(), gap.begin)
    except (OSError, AttributeError):
        pass  # not there yet, or a file system without holes: what has come stays


def close(log: str) -> Gap | None:
    """Make a log that nobody writes any more as short as what is left of it; its gap, by which offsets in it change.

    None where nothing is left out, or there is no room for the short file: then it stays as it is.
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
        # Then the note, with the short file's size, and last the file: at each moment the note fits the file that is there.
        _write(log, gap, size=size)
        os.replace(beside, log)
    except OSError:
        _unlink(beside)
        return None
    return gap._replace(is_closed=True)


def _after_line(fd: int, offset: int) -> int:
    """The end of the line that is at `offset`; `offset` itself in a very long line."""
    offset = max(offset, 0)
    end = os.pread(fd, _LINE_BYTES, offset).find(b"\n")
    return offset + end + 1 if end >= 0 else offset


def _punch(fd: int, gap: Gap) -> None:
    import ctypes

    # By ctypes, for Python's posix_fallocate takes no flags. A system without this kind of hole fails, and changes nothing.
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
    """size: of the short file."""
    # Written beside it and renamed: a reader finds the old note or the new one, and never a part.
    beside = f"{path_of(log)}.new"
    with open(beside, "w", encoding="utf-8") as file:
        json.dump({"begin": gap.begin, "end": gap.end, "limit": gap.limit, "size": size}, file)
    os.replace(beside, path_of(log))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
