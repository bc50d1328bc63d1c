"""The workers' logs: one file per rank, merged into one view, complete or live.

Each worker writes its own file, so a rank that prints a gigabyte does not slow the others. The supervisor notes the
files' sizes about ten times a second (`log_order.txt`). The merged view orders lines by these notes.

A carriage return moves to the start of the line, as on a terminal, so later text replaces the line. The merged view
shows only the last state of a progress bar. During the run, it may also show the current state.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.runs.folder import RunFolder
from paceline.runs.log_start import LogStart
from paceline.system import gaps

_CHUNK = 1 << 16
#: A report shows at most this many characters of a line.
_LONGEST_SHOWN = 300
#: A longer line is shown in pieces of this many bytes, so that a log without newlines does not fill the memory.
_LONGEST_LINE = 1 << 16
#: Seconds after which an unfinished line is shown. The states of a progress bar are shown at the same interval.
_PATIENCE_S = 1.0


@dataclass(frozen=True)
class LogLine:
    """A line of a worker's log, without its newline.

    complete: False for the current state of a progress bar, which later states replace. begin: The line's offset in the
        log of its rank; -1 if unknown.
    """

    attempt: int
    rank: int
    text: str
    complete: bool = True
    begin: int = field(default=-1, compare=False)


#: A harmless message of torch on hosts whose name servers do not answer (getnameinfo(3), EAI_AGAIN).
_NOISE = b"[c10d] The hostname of the client socket cannot be retrieved. err="
_NOISE_LINE = re.compile(rb"(\[rank\d+\]:\s?)?\[W[^\]]*\] " + re.escape(_NOISE) + rb"-?\d+\s*(\(function \w+\))?\s*")


def _is_noise(line: bytes) -> bool:
    return _NOISE in line and _NOISE_LINE.fullmatch(line) is not None


class LineAssembler:
    """A decoder of one rank's log into lines, as a terminal shows them.

    begin: The offset in the log at which the last yielded line begins.
    """

    def __init__(self) -> None:
        self.begin = self._begin = 0
        self._partial = b""
        self._since = 0.0
        self._shown = b""

    def feed(self, data: bytes, at: int = 0) -> Iterator[str]:
        """Yield the lines that `data`, from offset `at` of the log, completes."""
        # Store when and where an unfinished line begins: after a while, the line is shown although its end is missing.
        if not self._partial:
            self._since, self._begin = time.monotonic(), at
        *whole, rest = (self._partial + data).split(b"\n")
        for line in whole:
            self.begin, self._begin = self._begin, self._begin + len(line) + 1
            text = _last_state(line)
            # The last state of a progress bar may have been shown already when its newline arrives. Don't show this state twice.
            if not (text == self._shown and text) and not _is_noise(text):
                yield _decode(text)
            self._shown = b""
        # If an unfinished line is long, keep only the text after its last carriage return, such as a progress bar's last state.
        if len(rest) > _LONGEST_LINE:
            # Ignore a carriage return at the end: the text before it stays visible until new text comes.
            cut = rest.rfind(b"\r", 0, -1) + 1
            rest, self._begin = rest[cut:], self._begin + cut
        # The cut may split a multi-byte character, whose parts are then shown as U+FFFD.
        while len(rest) > _LONGEST_LINE:
            self.begin, self._begin = self._begin, self._begin + _LONGEST_LINE
            yield _decode(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._partial = rest

    def feed_blocks(self, data: bytes, at: int = 0) -> Iterator[str]:
        """Yield the lines of `feed`, many joined in one text for speed."""
        end = data.rfind(b"\n")
        block = self._partial + data[: max(end, 0)]
        is_plain = end >= 0 and not self._shown and b"\r" not in block and b"\r" not in data and _NOISE not in block
        # A block must be valid UTF-8: replacing invalid bytes would shift the offsets in the text against those in the log.
        if not is_plain or (text := _strictly(block)) is None:
            yield from self.feed(data, at)
            return
        self.begin, self._begin = self._begin if self._partial else at, at + end + 1
        if end == len(data) - 1:
            self._partial = b""
        else:
            self._partial, self._since = data[end + 1 :], time.monotonic()
        yield text

    def overdue(self) -> Iterator[str]:
        """Yield a line that stays unfinished for a second, except a progress bar."""
        if self._partial and b"\r" not in self._partial and time.monotonic() - self._since > _PATIENCE_S:
            self.begin = self._begin
            yield _decode(self._partial)
            self._partial = b""

    def unfinished(self) -> str | None:
        """Return a progress bar's new state, at most once per second, or None."""
        if b"\r" in self._partial and time.monotonic() - self._since > _PATIENCE_S:
            self._since = time.monotonic()
            state = _last_state(self._partial)
            if state and state != self._shown:
                self._shown, self.begin = state, self._begin
                return _decode(state)
        return None

    def end(self) -> Iterator[str]:
        """Yield the last line of the log if it has no newline."""
        if self._partial:
            text = _last_state(self._partial)
            if text and text != self._shown:
                self.begin = self._begin
                yield _decode(text)
        self._partial = b""


class Tail:
    """A reader of a growing log, parts of which may have been deleted."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self._file: io.BufferedReader | None = None
        self._gap: gaps.Gap | None = None
        self._gap_seen = (0, 0)
        self._ends_line = True
        self.position = position

    def read(self, until: int | None = None) -> Iterator[bytes]:
        """Yield the new bytes up to the offset `until` or the end."""
        if self._file is None:
            try:
                self._file = open(self._path, "rb")  # noqa: SIM115 - stays open while the run is followed
            except FileNotFoundError:
                return
        self._look_for_gap()
        self._file.seek(self.position)
        if until is None:
            # Read only up to the present end of the log, so that a rank that prints endlessly does not delay the other ranks.
            until = os.fstat(self._file.fileno()).st_size
        while self.position < until:
            stop, gap = until, self._gap
            if gap is not None and self.position < gap.end:
                if self.position >= gap.begin:
                    # The mark of a gap (a cut-out part) is a separate line. So first end a line that the gap has cut.
                    yield (b"" if self._ends_line else b"\n") + gap.mark(self.position)
                    self.position, self._ends_line = self._file.seek(gap.end), True
                    continue
                stop = min(until, gap.begin)
            data = self._file.read(min(_CHUNK, stop - self.position))
            if not data:
                return
            if self._look_for_gap() and self._gap is not None and self._gap.begin < self.position + len(data):
                self._file.seek(self.position)
                continue  # another process cut this part out of the log, so read again
            self.position, self._ends_line = self.position + len(data), data.endswith(b"\n")
            yield data

    def _look_for_gap(self) -> bool:
        try:
            found = os.stat(gaps.path_of(str(self._path)))
        except OSError:
            return False
        if (found.st_mtime_ns, found.st_ino) == self._gap_seen:
            return False
        self._gap_seen = (found.st_mtime_ns, found.st_ino)
        before, now = self._gap, gaps.read(str(self._path))
        if now is None or not now.is_closed or not self._is_at_its_path():
            # Another process is still cutting the log, or this reader has the uncut log open: use offsets in the uncut log.
            self._gap = now or before
            return True
        self._gap = None
        # This reader has opened the shortened file. So convert an offset after the cut to an offset in the shortened file.
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
    """A reader of one attempt's merged log. `new` yields the lines since its last call.

    Args:
        folder: The run's folder.
        attempt: Number of the attempt.
        ranks: Ranks to read; None for all, also for ranks that start later.
        start: Position at which to begin.
        in_blocks: Whether to join many lines in one text.
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
        """Yield the lines that were logged since the last call, in order."""
        if self._takes_all:
            self._add(self._folder.ranks_with_log(self._attempt))
        # First yield the bytes that the supervisor's notes list, in the order of the notes. The remaining bytes follow by rank.
        for data in self._order.read():
            *notes, self._order_rest = (self._order_rest + data).split(b"\n")
            for note in notes:
                yield from self._to(note)
        for rank, lines in self._lines.items():
            yield from self._grow(rank, None)
            yield from self._as_lines(rank, lines.overdue())
            if (state := lines.unfinished()) is not None:
                yield LogLine(self._attempt, rank, state, complete=False, begin=lines.begin)

    def end(self) -> Iterator[LogLine]:
        """Yield the remaining lines of an attempt that has ended."""
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
        # Skip a line of the order file that a SIGKILL has cut short: the rank's next line also counts these bytes.
        except ValueError:
            return
        if number in self._tails:
            yield from self._grow(number, until)

    def _grow(self, rank: int, until: int | None) -> Iterator[LogLine]:
        tail, lines = self._tails[rank], self._lines[rank]
        for data in tail.read(until):
            yield from self._as_lines(rank, self._feed(lines, data, tail.position - len(data)))

    def _as_lines(self, rank: int, texts: Iterator[str]) -> Iterator[LogLine]:
        for text in texts:
            yield LogLine(self._attempt, rank, text, begin=self._lines[rank].begin)


def lines_of(
    folder: RunFolder,
    attempts: Iterable[int],
    ranks: list[int] | None,
    start: LogStart | None = None,
    *,
    in_blocks: bool = False,
) -> Iterator[LogLine]:
    """Yield the merged lines of these attempts, one attempt after another.

    start: Position at which to begin. in_blocks: Whether to join many lines in one text.
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
    """A reader of a live run's merged log. `new` yields the lines since its last call.

    Args:
        folder: The run's folder.
        ranks: Ranks to read; None for all, also for ranks that start later.
        start: Position at which to begin; by default, the start of the first attempt.
        last: Number of lines to return at the first call, counted from the log's end; None for all.
    """

    def __init__(
        self, folder: RunFolder, ranks: list[int] | None, start: LogStart | None = None, last: int | None = None
    ) -> None:
        self._folder, self._ranks, self._last = folder, ranks, last
        self._number = start.attempt if start else 1
        self._log = AttemptLog(folder, self._number, ranks, start)

    def new(self, attempts: int, *, is_over: bool) -> Iterator[LogLine]:
        """Yield the lines that were added since the last call.

        attempts: The current number of attempts. is_over: Whether the run has ended before this call.
        """
        lines = self._new(attempts, is_over=is_over)
        if self._last is not None:
            # `last` limits only the lines that exist at the first call.
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
    """A reader of the nodes' output while they prepare a run or store outputs."""

    def __init__(self, folder: RunFolder, node_count: int) -> None:
        self._tails = {rank: Tail(folder.prepare_log(rank)) for rank in range(node_count)}
        self._lines = {rank: LineAssembler() for rank in self._tails}

    def new(self) -> Iterator[LogLine]:
        """Yield new lines and progress bars, with the node's rank as `rank`."""
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
    """Return a log's last `count` lines, not counting empty lines at its end."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - window))
            data = file.read()
    except OSError:
        return []
    lines = [_decode(_last_state(line)) for line in data.rstrip().split(b"\n") if not _is_noise(line)]
    # The bytes that were read may begin in the middle of a line, so drop this first line.
    if size > window and len(lines) > 1:
        lines = lines[1:]
    return [line[:_LONGEST_SHOWN] for line in lines[-count:]] if data.strip() else []


def _last_state(line: bytes) -> bytes:
    """Return the text that a terminal shows for a line with carriage returns."""
    if b"\r" not in line:
        return line
    pieces = [piece for piece in line.split(b"\r") if piece]
    return pieces[-1] if pieces else b""


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _strictly(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
