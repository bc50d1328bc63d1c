"""Progress of a transfer, counted by many threads and reported ten times a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import IO, TypeAlias

from paceline.system.units import size_text as size_text  # noqa: PLC0414 - its other users take it from here

#: A function that is called with (bytes done, total bytes, files done, total files).
Progress: TypeAlias = "Callable[[int, int, int, int], None]"

_EVERY_S = 0.1
_BAR = 24


class Meter:
    """A thread-safe counter of transferred bytes and files."""

    def __init__(self, progress: Progress | None, total_bytes: int, total_files: int) -> None:
        self._progress = progress
        self._total_bytes, self._total_files = total_bytes, total_files
        self._bytes = self._files = 0
        self._told_at = 0.0
        self._guard = threading.Lock()

    def add(self, size: int, files: int = 0) -> None:
        """Count transferred bytes and files. A negative count undoes an earlier count."""
        # Report while holding the lock, so that reports of several threads arrive in order. `progress` must not call this object.
        with self._guard:
            self._bytes += size
            self._files += files
            if self._progress is None or time.monotonic() - self._told_at < _EVERY_S:
                return
            self._told_at = time.monotonic()
            self._progress(*self._figures())

    def finish(self, files: int = 0) -> None:
        """Add `files` to the transferred files, and report the final progress."""
        with self._guard:
            self._files += files
            if self._progress is not None:
                self._progress(*self._figures())

    def _figures(self) -> tuple[int, int, int, int]:
        # More bytes may arrive than were listed, if a store reports no sizes.
        return self._bytes, max(self._total_bytes, self._bytes), self._files, self._total_files


def terminal_bar(verb: str, stream: IO[str] | None = None) -> Progress | None:
    """Return a function that prints `verb` and a progress bar, or None without a terminal."""
    out = stream or sys.stderr
    if not out.isatty():
        return None

    def draw(done: int, total: int, files: int, all_files: int) -> None:
        filled = _BAR * done // total if total else _BAR
        text = f"{verb} {'=' * filled}{'.' * (_BAR - filled)} {size_text(done)} of {size_text(total)}"
        is_last = files == all_files
        out.write(f"\r{text}, {files} of {all_files} files\x1b[K" + ("\n" if is_last else ""))
        out.flush()

    return draw
