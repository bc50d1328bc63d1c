"""The workers' logs as a reader sees them: one file a rank, merged into one view, from the start or live.

Each worker's output goes straight into its own file, so one that prints a gigabyte costs the others nothing. The
supervisor notes now and then how far each file has grown (`log_order.txt`); by these notes the merged view has lines
in the order they were written, to about a tenth of a second, also long afterwards.

A carriage return starts its line over, as on a terminal: of a progress bar, the merged view shows the state that was
there when the line ended, and while it goes on, now and then the latest.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.runs.folder import RunFolder
from paceline.runs.log_start import LogStart
from paceline.system import gaps

_CHUNK = 1 << 16
#: Of a line in a report, so many characters.
_LONGEST_SHOWN = 300
#: A line without an end is shown in pieces of this size, so that no log can fill memory.
_LONGEST_LINE = 1 << 16
#: Seconds after which an unfinished line is shown as it is, and between two states of a progress bar.
_PATIENCE_S = 1.0


@dataclass(frozen=True)
class LogLine:
    """A line of a worker's log, without its end. attempt and rank say whose.

    complete: its end was written; if not, it is the state by now of a progress bar, which will be replaced.
    """

    attempt: int
    rank: int
    text: str
    complete: bool = True


#: Said by torch on each rank of several hosts whose name servers do not answer (getnameinfo(3), EAI_AGAIN): it wanted a
#: name for an address, takes the address, and nothing is wrong. No setting silences it that would not silence others too.
_NOISE = b"[c10d] The hostname of the client socket cannot be retrieved. err="
_NOISE_LINE = re.compile(rb"(\[rank\d+\]:\s?)?\[W[^\]]*\] " + re.escape(_NOISE) + rb"-?\d+\s*(\(function \w+\))?\s*")


def _is_noise(line: bytes) -> bool:
    return _NOISE in line and _NOISE_LINE.fullmatch(line) is not None


class LineAssembler:
    """Bytes in, whole lines out, for one rank: UTF-8, carriage returns resolved."""

    def __init__(self) -> None:
        self._partial = b""
        self._since = 0.0
        self._shown = b""

    def feed(self, data: bytes) -> Iterator[str]:
        # Nothing was waiting for its end, so a wait is counted from now.
        if not self._partial:
            self._since = time.monotonic()
        *whole, rest = (self._partial + data).split(b"\n")
        for line in whole:
            text = _last_state(line)
            # The end of a progress bar whose latest state was shown already needs no line of its own.
            if not (text == self._shown and text) and not _is_noise(text):
                yield _decode(text)
            self._shown = b""
        # Of an unfinished line only the last state can still matter.
        if len(rest) > _LONGEST_LINE:
            # Not the last byte: behind a carriage return that stands there nothing has come yet that could replace the state
            # before it.
            rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        # A cut may go through a character of several bytes, which then shows as U+FFFD.
        while len(rest) > _LONGEST_LINE:
            yield _decode(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._partial = rest

    def feed_blocks(self, data: bytes) -> Iterator[str]:
        """Yield the lines of `feed`, where it can be many in one text, with line ends between them: far quicker."""
        end = data.rfind(b"\n")
        block = self._partial + data[: max(end, 0)]
        if end < 0 or self._shown or b"\r" in block or b"\r" in data or _NOISE in block:
            yield from self.feed(data)
            return
        if end == len(data) - 1:
            self._partial = b""
        else:
            self._partial, self._since = data[end + 1 :], time.monotonic()
        yield _decode(block)

    def overdue(self) -> Iterator[str]:
        """The beginning of a line that has waited long for its end, and is no progress bar."""
        if self._partial and b"\r" not in self._partial and time.monotonic() - self._since > _PATIENCE_S:
            yield _decode(self._partial)
            self._partial = b""

    def unfinished(self) -> str | None:
        """The latest state of a progress bar, now and then, if it is not the one that was told last."""
        if b"\r" in self._partial and time.monotonic() - self._since > _PATIENCE_S:
            self._since = time.monotonic()
            state = _last_state(self._partial)
            if state and state != self._shown:
                self._shown = state
                return _decode(state)
        return None

    def end(self) -> Iterator[str]:
        """The rest at the end of the log."""
        if self._partial:
            text = _last_state(self._partial)
            if text and text != self._shown:
                yield _decode(text)
        self._partial = b""


class Tail:
    """A log file that is read as it grows. In the place of what is left out of its middle (`paceline.system.gaps`) comes the line
    that says so.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self._file: io.BufferedReader | None = None
        self._gap: gaps.Gap | None = None
        self._gap_seen = (0, 0)
        self._ends_line = True
        self.position = position

    def read(self, until: int | None = None) -> Iterator[bytes]:
        """The bytes that are there now, up to the offset `until`, in pieces. A file that grows meanwhile is not chased."""
        if self._file is None:
            try:
                self._file = open(self._path, "rb")  # noqa: SIM115 - stays open while the run is followed
            except FileNotFoundError:
                return
        self._look_for_gap()
        self._file.seek(self.position)
        if until is None:
            # Fixed before the first byte is read, so that a rank that prints without end does not keep the others' lines
            # waiting.
            until = os.fstat(self._file.fileno()).st_size
        while self.position < until:
            stop, gap = until, self._gap
            if gap is not None and self.position < gap.end:
                if self.position >= gap.begin:
                    # The mark has a line of its own, also where what is left out begins in the middle of one.
                    yield (b"" if self._ends_line else b"\n") + gap.mark(self.position)
                    self.position, self._ends_line = self._file.seek(gap.end), True
                    continue
                stop = min(until, gap.begin)
            data = self._file.read(min(_CHUNK, stop - self.position))
            if not data:
                return
            if self._look_for_gap() and self._gap is not None and self._gap.begin < self.position + len(data):
                self._file.seek(self.position)
                continue  # it may have been left out while it was read
            self.position, self._ends_line = self.position + len(data), data.endswith(b"\n")
            yield data

    def _look_for_gap(self) -> bool:
        """True if more is left out than when it was looked at last."""
        try:
            found = os.stat(gaps.path_of(str(self._path)))
        except OSError:
            return False
        if (found.st_mtime_ns, found.st_ino) == self._gap_seen:
            return False
        self._gap_seen = (found.st_mtime_ns, found.st_ino)
        before, now = self._gap, gaps.read(str(self._path))
        if now is None or not now.is_closed or not self._is_at_its_path():
            # Of a log that was made short, the long file stays as it was, for whoever has it open.
            self._gap = now or before
            return True
        self._gap = None
        # The short file has come in the long one's place, where what follows has other offsets.
        if before is not None and self.position >= before.end:
            self.position = now.place(self.position)
        return False

    def _is_at_its_path(self) -> bool:
        assert self._file is not None, "it is looked at once it is open"
        try:
            return os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino
        except OSError:
            return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class AttemptLog:
    """The merged log of one attempt, to be read once from the start to wherever it is, again and again.

    ranks: None for all, those included that a script starts later. start: a place in this attempt to begin at. in_blocks: a
        text may hold many whole lines.
    """

    def __init__(
        self,
        folder: RunFolder,
        attempt: int,
        ranks: list[int] | None,
        start: LogStart | None = None,
        *,
        in_blocks: bool = False,
    ) -> None:
        self._folder, self._attempt = folder, attempt
        self._offsets = start.offsets if start else {}
        self._takes_all = ranks is None
        self._order = Tail(folder.log_order(attempt), start.notes if start else 0)
        self._order_rest = b""
        self._tails: dict[int, Tail] = {}
        self._lines: dict[int, LineAssembler] = {}
        self._feed = LineAssembler.feed_blocks if in_blocks else LineAssembler.feed
        self._add(ranks or [])

    def new(self) -> Iterator[LogLine]:
        """Lines that have come since the last call, in order."""
        if self._takes_all:
            self._add(self._folder.ranks_with_log(self._attempt))
        # Notes first: they give the order of what is there already. What they don't speak of yet comes behind it, by rank.
        for data in self._order.read():
            *notes, self._order_rest = (self._order_rest + data).split(b"\n")
            for note in notes:
                yield from self._to(note)
        for rank, lines in self._lines.items():
            yield from self._grow(rank, None)
            yield from self._as_lines(rank, lines.overdue())
            if (state := lines.unfinished()) is not None:
                yield LogLine(self._attempt, rank, state, complete=False)

    def end(self) -> Iterator[LogLine]:
        """The last lines, of an attempt that is over."""
        yield from self.new()
        for rank, lines in self._lines.items():
            yield from self._as_lines(rank, lines.end())

    def close(self) -> None:
        for tail in (self._order, *self._tails.values()):
            tail.close()

    def _add(self, ranks: list[int]) -> None:
        for rank in ranks:
            if rank not in self._tails:
                self._tails[rank] = Tail(self._folder.rank_log(self._attempt, rank), self._offsets.get(rank, 0))
                self._lines[rank] = LineAssembler()

    def _to(self, note: bytes) -> Iterator[LogLine]:
        try:
            _, rank, offset = note.split()
            number, until = int(rank), int(offset)
        # A note that a kill has cut short: its bytes come with the rank's next one.
        except ValueError:
            return
        if number in self._tails:
            yield from self._grow(number, until)

    def _grow(self, rank: int, until: int | None) -> Iterator[LogLine]:
        for data in self._tails[rank].read(until):
            yield from self._as_lines(rank, self._feed(self._lines[rank], data))

    def _as_lines(self, rank: int, texts: Iterator[str]) -> Iterator[LogLine]:
        for text in texts:
            yield LogLine(self._attempt, rank, text)


def lines_of(
    folder: RunFolder,
    attempts: Iterable[int],
    ranks: list[int] | None,
    start: LogStart | None = None,
    *,
    in_blocks: bool = False,
) -> Iterator[LogLine]:
    """Yield the merged lines of these attempts as they stand now, one attempt after another.

    start: a place to begin at. in_blocks: a text may hold many whole lines, with line ends between them.
    """
    for number in attempts:
        if start is not None and number < start.attempt:
            continue
        begin = start if start is not None and number == start.attempt else None
        log = AttemptLog(folder, number, ranks, begin, in_blocks=in_blocks)
        try:
            yield from log.end()
        finally:
            log.close()


class LogFollower:
    """The merged log of a run, to be asked for what is new again and again.

    ranks: None for all, those included that a script starts later.
    start: where to begin, default its first attempt's start. last: of what is there already, so many lines.
    """

    def __init__(
        self, folder: RunFolder, ranks: list[int] | None, start: LogStart | None = None, last: int | None = None
    ) -> None:
        self._folder, self._ranks, self._last = folder, ranks, last
        self._number = start.attempt if start else 1
        self._log = AttemptLog(folder, self._number, ranks, start)

    def new(self, attempts: int, *, is_over: bool) -> Iterator[LogLine]:
        """Lines that have come since the last call.

        attempts: how many there are by now. is_over: no more will be written; seen before this call.
        """
        lines = self._new(attempts, is_over=is_over)
        if self._last is not None:
            # The first call alone has lines that were there before anybody followed.
            lines = iter(deque(lines, maxlen=self._last))
            self._last = None
        yield from lines

    def _new(self, attempts: int, *, is_over: bool) -> Iterator[LogLine]:
        yield from self._log.new()
        while self._number < attempts:
            yield from self._log.end()
            self.close()
            self._number += 1
            self._log = AttemptLog(self._folder, self._number, self._ranks)
            yield from self._log.new()
        if is_over:
            yield from self._log.end()

    def close(self) -> None:
        self._log.close()


class PrepareFollower:
    """The lines of nodes that prepare and store, to be asked for what is new again and again."""

    def __init__(self, folder: RunFolder, node_count: int) -> None:
        self._tails = {rank: Tail(folder.prepare_log(rank)) for rank in range(node_count)}
        self._lines = {rank: LineAssembler() for rank in self._tails}

    def new(self) -> Iterator[LogLine]:
        """Lines that have come since the last call, and states of a progress bar; `rank` is the node's."""
        for rank, tail in self._tails.items():
            for data in tail.read():
                for text in self._lines[rank].feed(data):
                    yield LogLine(0, rank, text)
            if (bar := self._lines[rank].unfinished()) is not None:
                yield LogLine(0, rank, bar, complete=False)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


def last_lines(path: Path, count: int, *, window: int = 1 << 15) -> list[str]:
    """The last `count` lines of a log of any size, empty ones at its end left out."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - window))
            data = file.read()
    except OSError:
        return []
    lines = [_decode(_last_state(line)) for line in data.rstrip().split(b"\n") if not _is_noise(line)]
    # The window begins anywhere in a line, so its first is no whole one.
    if size > window and len(lines) > 1:
        lines = lines[1:]
    return [line[:_LONGEST_SHOWN] for line in lines[-count:]] if data.strip() else []


def _last_state(line: bytes) -> bytes:
    """The piece that a terminal shows of a line with carriage returns, near enough: the last that is not empty."""
    if b"\r" not in line:
        return line
    pieces = [piece for piece in line.split(b"\r") if piece]
    return pieces[-1] if pieces else b""


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
