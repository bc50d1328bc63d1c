"""Log files printed as they are, or fit for a terminal: a worker's own, the supervisor's, a node's."""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.runs.log_start import tail_offset
from paceline.runs.logs import LineAssembler
from paceline.runs.visible import TerminalLines
from paceline.system import gaps

#: What the supervisor's lines begin with.
_STAMP = re.compile(rb"(\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2})Z ")


@dataclass(frozen=True)
class LogPart:
    """A log, from an offset on. One that is not there is empty."""

    path: Path
    offset: int = 0


def print_parts(parts: Sequence[LogPart], tail: int | None = None, *, as_is: bool) -> None:
    """Print logs one after another. tail: the last lines of all together alone. as_is: byte for byte, else line by line,
    with what a terminal would obey left out.
    """
    if tail is not None:
        parts = _last(parts, tail)
    for part in parts:
        # What print has buffered goes out before bytes that go past it.
        sys.stdout.flush()
        try:
            lines, terminal = LineAssembler(), TerminalLines()
            for data in gaps.pieces(str(part.path), part.offset):
                if as_is:
                    sys.stdout.buffer.write(data)
                    continue
                for text in lines.feed(data):
                    print(terminal.line(None, text))
            for text in lines.end():
                print(terminal.line(None, text))
        # A worker that has not started has no log yet, and a log may go with its run.
        except FileNotFoundError:
            continue
    sys.stdout.flush()


def driver_offset(path: Path, since_s: float) -> int:
    """Return the offset in the supervisor's log at which the lines of that time (seconds since 1970) begin.

    A line without a time, such as mpirun's, is as old as the one before it.
    """
    offset = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                if stamp := _STAMP.match(line):
                    at = dt.datetime.fromisoformat(stamp[1].decode()).replace(tzinfo=dt.timezone.utc)
                    if at.timestamp() + 1 > since_s:  # a stamp is the beginning of its second
                        break
                offset += len(line)
    except OSError:
        return 0
    return offset


def _last(parts: Sequence[LogPart], count: int) -> list[LogPart]:
    kept = []
    # What the last log has not, the one before it gives.
    for part in reversed(parts):
        kept.append(replace(part, offset=max(part.offset, tail_offset(part.path, count))))
        count -= _line_count(kept[-1])
    return kept[::-1]


def _line_count(part: LogPart) -> int:
    try:
        with open(part.path, "rb") as file:
            file.seek(part.offset)
            return sum(1 for _ in file)
    except OSError:
        return 0
