"""Find positions in a run's merged log: where the last lines begin, or at a time.

The index is `log_order.txt`. In each line, the supervisor has noted a time, a rank, and the size of the rank's log.
These notes cut each log into spans, in the order of the merged log. Bytes without a note come last, in order of rank:

    1700000000.1 0 4        span 1: rank 0, bytes 0 to 4
    1700000000.2 1 2        span 2: rank 1, bytes 0 to 2
    1700000000.3 0 6        span 3: rank 0, bytes 4 to 6
                            span 4: rank 0 from byte 6; span 5: rank 1 from byte 2

A position is a point between two lines of the merged log. To find the last lines, this module counts newlines backwards
from the last span. To find a time, it bisects the notes.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt, parse_utc

_CHUNK = 1 << 16
#: Bytes of `log_order.txt` in the first read. Each further read is eight times as large as the read before, up to 4 MiB.
_NOTES, _MOST_NOTES = 1 << 16, 1 << 22
#: Search at most this many bytes backwards for the start of a line. A longer line is usually a progress bar: its end suffices.
_FAR_BACK = 1 << 20
#: The most bytes of a note. Each line of `log_order.txt` is a note about the output of one rank.
_NOTE_BYTES = 80


@dataclass(frozen=True)
class LogStart:
    """A position in a run's merged log, as an offset in each rank's log.

    Attributes:
        attempt: The first attempt to show.
        notes: Offset in `log_order.txt`, which records the logs' sizes over time. Later lines are about bytes after the position.
        offsets: Rank -> offset in this rank's log. The offset of missing ranks is 0.
    """

    attempt: int = 1
    notes: int = 0
    offsets: Mapping[int, int] = field(default_factory=dict)

    def later(self, other: LogStart) -> LogStart:
        """Return the later of two positions: in each log, the greater offset."""
        if self.attempt != other.attempt:
            return max(self, other, key=lambda start: start.attempt)
        ranks = {*self.offsets, *other.offsets}
        offsets = {rank: max(self.offsets.get(rank, 0), other.offsets.get(rank, 0)) for rank in ranks}
        return LogStart(self.attempt, max(self.notes, other.notes), offsets)


def last_lines_start(
    folder: RunFolder, attempts: Sequence[int], ranks: Sequence[int], count: int, *, unended: bool = True
) -> LogStart:
    """Return a position at, or a little before, the last `count` lines of these ranks.

    attempts: Numbers of the attempts to search, in order. Without attempts, the result is the log's beginning.
    unended: Whether a last line without a newline counts as a line.
    """
    start = LogStart(attempts[0] if attempts else 1)
    for attempt in reversed(attempts):
        start, found = _from_the_end(folder, attempt, ranks, count, unended)
        count -= found
        if count <= 0:
            break
    return start


def start_before(folder: RunFolder, attempt: int, ranks: Sequence[int], line: tuple[int, int], count: int) -> LogStart:
    """Return a position at least `count` lines before a line of the merged log.

    line: The rank of this line, and the line's offset in the rank's log.
    """
    return _from_the_end(folder, attempt, ranks, count, unended=False, line=line)[0]


def moment_start(
    folder: RunFolder, attempts: Sequence[Attempt], ranks: Sequence[int], time_s: float
) -> LogStart | None:
    """Return the position of the first line completed at `time_s` or later.

    attempts: The attempts, in order. If all ended before `time_s` (seconds since 1970), the result is None.
    """
    for attempt in attempts:
        if attempt.ended_utc is not None and parse_utc(attempt.ended_utc).timestamp() < time_s:
            continue
        with _Notes(folder.log_order(attempt.number)) as notes:
            place = notes.at(time_s)
            offsets = notes.offsets(ranks, place)
        return LogStart(attempt.number, place, _line_starts(folder, attempt.number, offsets))
    return None if attempts else LogStart()


def tail_offset(path: Path, count: int) -> int:
    """Return the offset of a file's last `count` lines; an unfinished line counts."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            # A last line without a newline counts as a line, too.
            count -= _is_unended(file, end)
            if count < 0:
                return end
            newlines = _newlines_back(file, 0, end)
            last = end
            for last in newlines:
                count -= 1
                if count < 0:
                    return last + 1
            return 0
    except OSError:
        return 0


def _from_the_end(
    folder: RunFolder,
    attempt: int,
    ranks: Sequence[int],
    count: int,
    unended: bool,
    line: tuple[int, int] | None = None,
) -> tuple[LogStart, int]:
    """Return a position `count` lines before the end, and the number of lines found.

    line: Rank and offset of a line before which the search starts; None: the end. unended: As for `last_lines_start`.
    """
    with contextlib.ExitStack() as files:
        logs: dict[int, IO[bytes]] = {}
        for rank in ranks:
            with contextlib.suppress(OSError):
                logs[rank] = files.enter_context(open(folder.rank_log(attempt, rank), "rb"))
        # Get the ends of the logs only once, because workers continue to write.
        ends = {rank: file.seek(0, os.SEEK_END) for rank, file in logs.items()}
        found = sum(_is_unended(file, ends[rank]) for rank, file in logs.items()) if unended else 0
        notes = files.enter_context(_Notes(folder.log_order(attempt)))
        if line is not None and line[0] in ends:
            ends = notes.cut(ends, *line)
        offsets, place = dict(ends), notes.size
        for span in notes.spans_back(ends) if found < count else ():
            offsets[span.rank], place = span.begin, span.place
            for newline in _newlines_back(logs[span.rank], span.begin, span.end):
                found += 1
                if found >= count:
                    # The first line to show ends at this newline. `_line_start` below finds the line's beginning.
                    offsets[span.rank] = newline
                    break
            if found >= count:
                break
        starts = {rank: _line_start(file, offsets[rank]) for rank, file in logs.items()}
        # If `count` is 0, show no existing line, not even an unfinished line.
        return LogStart(attempt, place, ends if count <= 0 else starts), found


@dataclass(frozen=True)
class _Span:
    """Adjacent bytes of a rank's log that are adjacent in the merged log too.

    `place`: offset in `log_order.txt`, which records the logs' sizes over time, of the line with the end of these bytes.
    """

    place: int
    rank: int
    begin: int
    end: int


class _Notes:
    """A reader of `log_order.txt`, which records sizes of the ranks' logs over time."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: IO[bytes] | None = open(path, "rb")  # noqa: SIM115 - closed by __exit__
            self.size = self._file.seek(0, os.SEEK_END)
        except OSError:
            self._file, self.size = None, 0
        #: Cache: rank -> (end offset of its earliest line of `log_order` read so far, size of its log in that line).
        self._seen: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> _Notes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def cut(self, ends: Mapping[int, int], rank: int, offset: int) -> dict[int, int]:
        """Limit this reader to the lines written before `rank`'s log exceeded `offset` bytes.

        Return {rank: size of its log at that time}. ends: Rank -> the present size of its log.
        """

        def noted(place: int) -> int:
            # Clear the cache, because it is valid only while positions decrease from call to call.
            self._seen.clear()
            return self.offsets([rank], place)[rank]

        behind = bisect.bisect_left(range(self.size + 1), offset + 1, key=noted)
        self._seen.clear()
        if behind > self.size:
            # The position is in bytes that no line of `log_order` covers. They end the merged log, in order of rank.
            sizes = self.offsets(tuple(ends), self.size)
            order = [*ends]
            sizes.update({one: ends[one] for one in order[: order.index(rank)]})
        else:
            top = max(0, behind - _NOTE_BYTES)
            self.size = top + self._read(top, behind - 1).rfind(b"\n") + 1
            sizes = self.offsets(tuple(ends), self.size)
        return {one: min(sizes[one], ends[one]) for one in ends} | {rank: min(offset, ends[rank])}

    def spans_back(self, ends: Mapping[int, int]) -> Iterator[_Span]:
        """Yield the pieces (`_Span`) of the merged log, the last piece first.

        ends: Rank -> the size of this rank's log.
        """
        end, want = self.size, _NOTES
        # Begin with the bytes that no line of `log_order` covers, because they come last in the merged log.
        offsets = self.offsets(tuple(ends), end)
        for rank in reversed(ends):
            if offsets[rank] < ends[rank]:
                yield _Span(end, rank, offsets[rank], ends[rank])
        while end > 0:
            begin = self._line_start(end - want)
            if begin >= end:  # without a newline there is no complete line
                begin = 0
            offsets = self.offsets(tuple(ends), begin)
            spans = []
            for place, _, rank, offset in self._between(begin, end):
                if rank in ends and offsets[rank] < (until := min(offset, ends[rank])):
                    spans.append(_Span(place, rank, offsets[rank], until))
                    offsets[rank] = until
            yield from reversed(spans)
            end, want = begin, min(want * 8, _MOST_NOTES)

    def offsets(self, ranks: Sequence[int], end: int) -> dict[int, int]:
        """Return {rank: the last log size in `log_order.txt` before offset `end`, or 0}."""
        # Search for the ranks of which the cache has no line of `log_order` before `end`.
        missing = {rank for rank in ranks if rank not in self._seen or self._seen[rank][0] > end}
        at = end
        while at > 0 and missing:
            begin = max(0, at - _FAR_BACK)
            # Let the pieces overlap by a line's length, so that each line of `log_order` is whole in one of the pieces.
            top = max(0, begin - _NOTE_BYTES)
            data = self._read(top, at)
            for rank in list(missing):
                if (found := _last_offset(data, rank)) is not None:
                    self._seen[rank] = (top + found[0], found[1])
                    missing.remove(rank)
            at = begin
        # Cache that `log_order` has no line of these ranks before `end`, and so none before an earlier position.
        self._seen.update(dict.fromkeys(missing, (0, 0)))
        return {rank: self._seen[rank][1] for rank in ranks}

    def at(self, time_s: float) -> int:
        """Return the offset of the first line of `log_order.txt` from time `time_s` on."""
        # Bisect over the offsets of `log_order.txt`, because the times of its notes never decrease from one line to the next.
        lines = range(self.size + 1)
        return self._line_start(bisect.bisect_left(lines, time_s, key=self._time_at))

    def _time_at(self, place: int) -> float:
        """Return the time in the first line of `log_order.txt` from offset `place` on."""
        begin = self._line_start(place)
        for _, time_s, _, _ in self._between(begin, min(self.size, begin + 4 * _NOTE_BYTES)):
            return time_s
        return float("inf")

    def _line_start(self, place: int) -> int:
        """Return the offset of the first line of `log_order.txt` at or after `place`."""
        if place <= 0:
            return 0
        data = self._read(place - 1, min(self.size, place + 4 * _NOTE_BYTES))
        end = data.find(b"\n")
        return self.size if end < 0 else min(self.size, place + end)

    def _between(self, begin: int, end: int) -> Iterator[tuple[int, float, int, int]]:
        """Yield (offset, time, rank, log size) of lines of `log_order.txt` in a range."""
        place = begin
        *lines, _ = self._read(begin, end).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                time_s, rank, offset = line.split()
                yield place, float(time_s), int(rank), int(offset)
            place += len(line) + 1

    def _read(self, begin: int, end: int) -> bytes:
        if self._file is None:
            return b""
        self._file.seek(begin)
        return self._file.read(end - begin)


def _last_offset(data: bytes, rank: int) -> tuple[int, int] | None:
    """Return (end offset, log size) of a rank's last line of `log_order.txt` in `data`."""
    # Search for the rank between two spaces. So 1 matches neither in 11 nor in the size, because the size ends a line.
    word, end = b" %d " % rank, len(data)
    while (at := data.rfind(word, 0, end)) >= 0:
        begin = at + len(word)
        line, newline, _ = data[begin : begin + _NOTE_BYTES].partition(b"\n")
        if newline and line.isdigit():
            return begin + len(line) + 1, int(line)
        end = begin - 1
    return None


def _line_starts(folder: RunFolder, attempt: int, offsets: Mapping[int, int]) -> dict[int, int]:
    starts = {}
    for rank, offset in offsets.items():
        with contextlib.suppress(OSError), open(folder.rank_log(attempt, rank), "rb") as file:
            starts[rank] = _line_start(file, offset)
    return starts


def _line_start(file: IO[bytes], offset: int) -> int:
    begin = max(0, offset - _FAR_BACK)
    # If no newline is found within the limit, treat the limit as the beginning of the line.
    return next(_newlines_back(file, begin, offset), begin - 1) + 1


def _newlines_back(file: IO[bytes], begin: int, end: int) -> Iterator[int]:
    while end > begin:
        first = max(begin, end - _CHUNK)
        file.seek(first)
        data = file.read(end - first)
        at = len(data)
        while (at := data.rfind(b"\n", 0, at)) >= 0:
            yield first + at
        end = first


def _is_unended(file: IO[bytes], end: int) -> bool:
    file.seek(max(0, end - _CHUNK))
    return bool(file.read(_CHUNK).rpartition(b"\n")[2].strip(b"\r"))
