"""The log of a service: output of its supervisor and servers, limited in size."""

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
    """Move the log to `folder.old_log` if it exceeds `most_bytes`. Replace the old log."""
    try:
        if folder.log.stat().st_size <= most_bytes:
            return
        # Copy and truncate the log instead of renaming it: servers have the file open for appending.
        shutil.copyfile(folder.log, folder.old_log)
        os.truncate(folder.log, 0)
    except OSError:
        return  # disk full: the next call may succeed


def last_lines(folder: ServiceFolder, count: int) -> str:
    """Return the last `count` lines of the log with their line ends."""
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
    """Yield new text of the log, in whole lines, until `is_over` returns True."""
    tail = GrowingLog(folder.log, folder.log.stat().st_size if folder.log.exists() else 0)
    while True:
        # Check whether the service has ended before reading its log, so that the last lines are not lost.
        over = is_over()
        if text := tail.new():
            yield text
        if over:
            return
        time.sleep(_PAUSE_S)


class GrowingLog:
    """A reader of a log's new text, which starts at byte `at`.

    After the log was truncated, reading starts again at byte 0.
    """

    def __init__(self, path: Path, at: int = 0) -> None:
        self.path, self._at = path, at

    def new(self, *, whole_lines: bool = True) -> str:
        """Return the text that was added since the last call.

        Args:
            whole_lines: Return only whole lines. An incomplete last line is left for the next call.
        """
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
