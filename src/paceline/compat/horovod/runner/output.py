"""The ranks' output as lines `[rank]<stdout>:text`, and in a file for each rank."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import UserError

_LAST_LINES = 20
#: If a line is longer than this, show it in pieces of this many bytes.
_LONGEST_LINE_BYTES = 1 << 20


class Output:
    """A writer that combines pieces of the ranks' output to whole lines.

    A line ends with a line feed, or with the carriage return of a progress bar.

    With `to_streams`, write to `sys.stdout` and `sys.stderr` (a notebook's cell) instead of file descriptors 1 and 2.
    If `folder` is given, its files `rank.<n>/stdout` and `rank.<n>/stderr` get the raw output.
    """

    def __init__(self, *, folder: str | None = None, timestamps: bool = False, to_streams: bool = False) -> None:
        self._timestamps, self._to_streams = timestamps, to_streams
        # (rank, stream) -> output after the rank's last line end.
        self._parts: dict[tuple[int, str], bytes] = {}
        self._last: dict[int, deque[str]] = {}
        self._files: dict[tuple[int, str], io.FileIO] = {}
        self._folder = folder

    def grow(self, size: int) -> None:
        """Prepare to receive the output of `size` ranks."""
        new = [rank for rank in range(size) if rank not in self._last]
        self._last |= {rank: deque(maxlen=_LAST_LINES) for rank in new}
        if self._folder is not None:
            self._open(Path(self._folder), new, size)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Write a piece of a rank's "stdout" or "stderr"."""
        # Write the bytes to the file at once. For the display, wait until the line is complete.
        self._keep(rank, stream, data)
        text = self._parts.pop((rank, stream), b"") + data
        text, held = (text[:-1], b"\r") if text.endswith(b"\r") else (text, b"")
        whole, end, rest = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").rpartition(b"\n")
        if len(rest) > _LONGEST_LINE_BYTES:
            whole, end, rest = whole + end + rest, b"\n", b""
        if rest or held:
            self._parts[rank, stream] = rest + held
        if end:
            self._show(rank, stream, whole)

    def finish(self, rank: int) -> None:
        """Write the rank's last line, even if no line feed ends it."""
        for stream in ("stdout", "stderr"):
            if rest := self._parts.pop((rank, stream), b""):
                # `write` has kept a final "\r" in case a "\n" followed. No "\n" came, so the "\r" is a line end: don't print it.
                self._show(rank, stream, rest.rstrip(b"\r"))

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """Return the rank's last lines of both streams, for an error message."""
        return tuple(self._last[rank])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, folder: Path, ranks: Iterable[int], size: int) -> None:
        # Pad the numbers with zeros (rank.07 of 16), so that a sorted list of the files is in the order of ranks.
        width = len(str(size - 1))
        try:
            for rank in ranks:
                place = folder / f"rank.{rank:0{width}}"
                place.mkdir(parents=True, exist_ok=True)
                for stream in ("stdout", "stderr"):
                    # Don't buffer the output: if this process is killed after a rank's crash, the file still has the rank's last
                    # output.
                    self._files[rank, stream] = io.FileIO(place / stream, "w")
        except OSError as error:
            self.close()
            raise UserError(
                f"--output-filename {str(folder)!r} can't be written: {error}. Name a folder that can be made."
            ) from error

    def _keep(self, rank: int, stream: str, data: bytes) -> None:
        """Append to the rank's output file. If a write fails, stop writing it."""
        file = self._files.get((rank, stream))
        try:
            while file is not None and data:
                # An unbuffered file may accept only a part of the data, so repeat the write for the rest.
                data = data[file.write(data) or 0 :]
        except OSError as error:
            path = f"rank.{rank}/{stream}"
            print(f"horovodrun: {path} of --output-filename gets no more output: {error.strerror}.", file=sys.stderr)
            with contextlib.suppress(OSError):
                self._files.pop((rank, stream)).close()

    def _show(self, rank: int, stream: str, text: bytes) -> None:
        stamp = time.asctime().encode() if self._timestamps else b""
        prefix = stamp + f"[{rank}]<{stream}>:".encode()
        lines = text.split(b"\n")
        self._last[rank].extend(line.decode(errors="replace") for line in lines)
        self._put(stream, b"".join(prefix + line + b"\n" for line in lines))

    def _put(self, stream: str, data: bytes) -> None:
        if self._to_streams:
            target = sys.stdout if stream == "stdout" else sys.stderr
            target.write(data.decode(errors="replace"))
            target.flush()
            return
        # Bypass Python's buffer: lines appear at once, and if the reader has ended, the error comes here and not at exit.
        descriptor = 1 if stream == "stdout" else 2
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                # Another process, such as ssh, shares this pipe or terminal and made it non-blocking. It is full, so wait.
                select.select((), (descriptor,), ())
