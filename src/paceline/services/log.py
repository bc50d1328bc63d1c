"""The log of a service: what its supervisor says and its servers print, in one file that does not grow without end."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.services.folder import ServiceFolder

_MOST_BYTES = 64 << 20
_PAUSE_S = 0.1


def shorten(folder: ServiceFolder, most_bytes: int = _MOST_BYTES) -> None:
    """Put a log beyond its limit aside, in place of the one that was put aside before."""
    try:
        if folder.log.stat().st_size <= most_bytes:
            return
        # Copied and cut, not renamed: servers have it open, and add to its end wherever that is.
        shutil.copyfile(folder.log, folder.old_log)
        os.truncate(folder.log, 0)
    except OSError:
        return  # a full disk: the next look may find room


def last_lines(folder: ServiceFolder, count: int) -> str:
    """The last lines, with line ends. count: at most so many."""
    if count < 1:
        return ""
    text = b""
    for path in (folder.log, folder.old_log):
        try:
            text = path.read_bytes() + text
        except OSError:
            continue
        if text.count(b"\n") > count:
            break
    return b"".join(text.splitlines(keepends=True)[-count:]).decode("utf-8", errors="replace")


def follow(folder: ServiceFolder, is_over: Callable[[], bool]) -> Iterator[str]:
    """What is added to the log from now on, in whole lines, until `is_over`."""
    tail = GrowingLog(folder.log, folder.log.stat().st_size if folder.log.exists() else 0)
    while True:
        # First, so that what was written before the end is shown.
        over = is_over()
        if text := tail.new():
            yield text
        if over:
            return
        time.sleep(_PAUSE_S)


class GrowingLog:
    """A log that is read as it grows, from the byte `at` on; from its beginning once it was cut."""

    def __init__(self, path: Path, at: int = 0) -> None:
        self.path, self._at = path, at

    def new(self, *, whole_lines: bool = True) -> str:
        """What has come since the last look. whole_lines: a line without its end is left for the next one."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at = 0
                file.seek(self._at)
                data = file.read()
        except OSError:
            return ""
        if whole_lines:
            data = data[: data.rfind(b"\n") + 1]
        self._at += len(data)
        return data.decode("utf-8", errors="replace")
