"""Incremental reading of metric logs: new files, appended lines, and the last lines."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict, TypeGuard

#: After this many seconds a folder is listed again, even if its modification time is unchanged.
_LIST_S = 0.5
_CHUNK_BYTES = 1 << 17


class MetricEntry(TypedDict, total=False):
    """A line of a metric log, with one logged value.

    `kind` is a word such as "image", and None for a scalar. Readers of several logs add `rank` and `attempt`.
    """

    name: str
    value: Any
    kind: str
    time: float
    step: int
    rank: int
    attempt: int


class FolderListing:
    """A memory of a folder's last listing, to list it again only after changes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stamp: int | None = None
        self._listed_at = 0.0

    def is_due(self) -> bool:
        """Return whether to list the folder again, since it may have new files."""
        now = time.monotonic()
        try:
            stamp = os.stat(self._directory).st_mtime_ns
        except OSError:
            return False
        # List the folder again after a while: a coarse clock or an NFS client's cache may hide a change of its modification time.
        if stamp == self._stamp and now - self._listed_at < _LIST_S:
            return False
        self._stamp, self._listed_at = stamp, now
        return True


class LogTail:
    """A reader of a growing metric log; each call continues after the previous one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Offset in the file up to which lines have been read.
        self.position = 0

    def chunks(self, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the appended whole lines in chunks; keep an unfinished line for later.

        Raises:
            OSError: The log cannot be read.
        """
        # Reopen the file each time: an NFS client learns a file's new size when it opens the file.
        with open(self._path, "rb") as file:
            if os.fstat(file.fileno()).st_size <= self.position:
                return
            file.seek(self.position)
            while data := file.read(chunk_bytes):
                if not data.endswith(b"\n"):
                    # The chunk has no newline, so read on to the end of this long line.
                    data += file.readline()
                end = data.rfind(b"\n") + 1
                if end == 0:
                    return
                self.position += end
                # The last line of the file is unfinished, so leave it to the next call.
                file.seek(self.position)
                yield data[:end]


def parsed_lines(path: Path) -> Iterator[Any]:
    """Yield the JSON value of each line of a file, except lines cut short."""
    # Parsing a large chunk as one list is several times faster than parsing single lines.
    for data in LogTail(path).chunks(1 << 21):
        yield from parsed(data)


def parsed(data: bytes) -> Iterator[Any]:
    """Yield the JSON value of each line in a chunk, except broken lines."""
    lines = [line for line in data.split(b"\n") if line]
    try:
        # Parse the whole chunk before the first yield: if a line is invalid, parse all lines of the chunk one by one instead.
        yield from json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        for line in lines:
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                continue


def last_entries(path: Path, tail_bytes: int) -> list[MetricEntry]:
    """Return the entries in a metric log's last `tail_bytes`, the oldest first."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
            data = file.read(tail_bytes)
    except OSError:
        return []
    # The first line may be cut off, and the last line may still grow. `parsed` skips both.
    return [entry for entry in parsed(data) if is_entry(entry)]


#: Type of the value of each kind of metric whose readers combine several values.
_FORMS = {"list": list, "row": dict, "table": dict}


def is_entry(line: Any) -> TypeGuard[MetricEntry]:
    """Return whether a log's line is a logged value in the form of its kind."""
    if not isinstance(line, dict) or not isinstance(line.get("name"), str) or "value" not in line:
        return False
    kind, numbers = line.get("kind"), (line.get("time", 0), line.get("step", 0), line.get("attempt", 1))
    is_form = kind is None or (isinstance(kind, str) and isinstance(line["value"], _FORMS.get(kind, object)))
    return is_form and all(number is None or isinstance(number, (int, float)) for number in numbers)
