"""Log lines as a page requests them: the last lines, matches, or lines around a line.

A search by regular expression runs in a separate process, because some expressions take years.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypedDict

from paceline.errors import UserError
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.runs.log_levels import COLOUR, LEVELS, LevelFilter
from paceline.runs.log_start import last_lines_start, start_before
from paceline.runs.logs import LogLine, PrepareFollower, last_lines, lines_of
from paceline.runs.visible import visible_line
from paceline.ui.children import output_of

#: Maximum number of lines that a search returns.
_MOST_FOUND = 2_000
#: Time limit of a search in seconds; additional seconds after which the process that runs a regular expression is killed.
_LIMIT_S, _MORE_S = 20.0, 2.0
#: Maximum characters of one line in a response; maximum characters of all lines of a response together.
_LONGEST_LINE, _MOST_CHARS = 4_000, 8_000_000
#: Number of lines to show below the line that a link selects.
_BEHIND = 300
#: Maximum number of bytes of the supervisor's log to show. The page shows the end of the log.
_WINDOW = 1 << 20


class LogJson(TypedDict, total=False):
    """Log lines for the page, each as `line_json` returns it.

    count: Number of matches. is_partial: Whether the search has reached its time limit.
    at: Index in `lines` of the line that `around` searched; -1 if the log does not have that line.
    """

    lines: list[list[object]]
    more: bool
    count: int
    is_partial: bool
    at: int
    error: str


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """The log lines that a page requests.

    source: The log: "workers", "driver" (the supervisor's) or "prepare". rank, attempt: Only this rank or attempt; None
    for all. last: Number of lines. search: Only lines with this text, or a match if `is_regex`. level: Lowest level.
    """

    source: str = "workers"
    rank: int | None = None
    attempt: int | None = None
    last: int = 500
    search: str = ""
    is_regex: bool = False
    level: str = ""

    def __post_init__(self) -> None:
        if self.level and self.level not in LEVELS:
            raise UserError(f"level={self.level!r} is not a level of a log. Give one of {', '.join(LEVELS)}.")


def find(folder: RunFolder, query: LogQuery, check_reader: Callable[[], None]) -> LogJson:
    """Return the log lines that a query asks for.

    check_reader: Called repeatedly. It raises an error, which ends the search, if the browser has disconnected.

    Raises:
        UserError: The regular expression is malformed, or takes too long.
    """
    if query.search and query.is_regex:
        return _find_apart(folder, query, check_reader)
    return _find(folder, query, check_reader)


def around(folder: RunFolder, place: str, rank: int | None, before: int) -> LogJson:
    """Return the log lines around one line, such as a linked line.

    Args:
        folder: The run's folder.
        place: The line as "attempt.rank.offset", where the offset is in bytes of the rank's log.
        rank: Only lines of this rank; None for all ranks.
        before: Number of lines to return before the line.

    Raises:
        UserError: `place` is malformed.
    """
    parts = place.split(".")
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in parts):
        raise UserError(f"line={place!r} is not a line of a log. Copy the link of a line, such as line=1.0.2048.")
    attempt, own, offset = map(int, parts)
    ranks = [one for one in folder.ranks(read.record(folder).world_size) if rank is None or one in (rank, own)]
    start = start_before(folder, attempt, ranks, (own, offset), before)
    lines = [*islice(lines_of(folder, [attempt], ranks, start), before + _BEHIND + len(ranks))]
    at = [number for number, line in enumerate(lines) if line.rank == own and line.begin <= offset]
    return {"lines": [*map(line_json, lines)], "more": start.notes > 0, "at": at[-1] if at else -1}


def text(folder: RunFolder, query: LogQuery) -> Iterator[bytes]:
    """Yield a run's log without colours. Lines of several ranks begin with the rank."""
    is_one = query.rank is not None or len(folder.ranks(read.record(folder).world_size)) == 1
    for line in _lines(folder, query, None):
        name = "" if is_one else f"{line.rank}: "
        for part in line.text.split("\n"):
            yield f"{name}{COLOUR.sub('', visible_line(part))}\n".encode("utf-8", "replace")


def line_json(line: LogLine) -> list[object]:
    """Return a log line as [attempt, rank, text with colours, 1 if complete, offset].

    The text of a very long line is cut. offset: Where the line begins, in bytes of the rank's log.
    """
    left_out = len(line.text) - _LONGEST_LINE
    text = f"{line.text[:_LONGEST_LINE]} … {left_out:,} more characters" if left_out > 0 else line.text
    return [line.attempt, line.rank, visible_line(text), int(line.complete), line.begin]


def _fitting(lines: Collection[LogLine]) -> list[list[object]]:
    found: deque[list[object]] = deque()
    room = _MOST_CHARS
    for line in reversed([*lines]):
        found.appendleft(line_json(line))
        room -= len(str(found[0][2]))
        if room < 0:
            break
    return [*found]


def _find(folder: RunFolder, query: LogQuery, check_reader: Callable[[], None]) -> LogJson:
    if not query.search and not query.level:
        lines = deque(_lines(folder, query, query.last), maxlen=query.last)
        shown = _fitting(lines)
        return {"lines": shown, "more": len(lines) == query.last or len(shown) < len(lines)}
    matches = _matcher(query)
    levels = LevelFilter(LEVELS[query.level]) if query.level else None
    found: deque[LogLine] = deque(maxlen=_MOST_FOUND)
    count, end, is_partial = 0, time.monotonic() + _LIMIT_S, False
    for block in _lines(folder, query, None):
        writer = (block.attempt, block.rank)
        if levels is None and not query.is_regex and "\x1b" not in block.text and not matches(block.text):
            continue
        for at, line in _with_places(block.text) if levels is None else levels.lines(writer, block.text):
            if matches(COLOUR.sub("", line) if "\x1b" in line else line):
                count += 1
                begin = block.begin + (at if block.text.isascii() else len(block.text[:at].encode()))
                found.append(replace(block, text=line, begin=begin))
        check_reader()
        if is_partial := time.monotonic() > end:
            break
    shown = _fitting(found)
    return {"lines": shown, "more": count > len(shown), "count": count, "is_partial": is_partial}


def _with_places(block: str) -> Iterator[tuple[int, str]]:
    at = 0
    for line in block.split("\n"):
        yield at, line
        at += len(line) + 1


def _lines(folder: RunFolder, query: LogQuery, last: int | None) -> Iterator[LogLine]:
    record = read.record(folder)
    if query.source == "driver":
        for line in last_lines(folder.driver_log, last or _WINDOW, window=_WINDOW):
            yield LogLine(0, 0, line)
    elif query.source == "prepare":
        follower = PrepareFollower(folder, record.job.node_count if record.job else 1)
        yield from (replace(line, complete=True) for line in follower.new())
        follower.close()
    else:
        ranks = [one for one in folder.ranks(record.world_size) if query.rank in (None, one)]
        attempts = [one.number for one in record.attempts if query.attempt in (None, one.number)]
        start = None if last is None else last_lines_start(folder, attempts, ranks, last)
        yield from lines_of(folder, attempts, ranks, start, in_blocks=last is None)


def _matcher(query: LogQuery) -> Callable[[str], object]:
    if query.is_regex:
        return re.compile(query.search, re.IGNORECASE).search
    wanted = query.search.lower()
    return lambda line: wanted in line.lower()


def _find_apart(folder: RunFolder, query: LogQuery, check_reader: Callable[[], None]) -> LogJson:
    words = ["paceline.ui.log_view", os.fspath(folder.path.absolute()), json.dumps(asdict(query))]
    try:
        found: LogJson = json.loads(output_of(words, _LIMIT_S + _MORE_S, check_reader))
    except (subprocess.TimeoutExpired, ValueError):
        raise UserError(
            f"the regular expression {query.search!r} takes longer than {_LIMIT_S:.0f} s. Nested repetitions, such as "
            "(a+)+, take very long. Simplify it, or search for a text."
        ) from None
    if "error" in found:
        raise UserError(
            f"the regular expression {query.search!r} is malformed: {found['error']}. Correct it, or search for a text."
        )
    return found


def main(words: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(_LIMIT_S + _MORE_S), int(_LIMIT_S + _MORE_S)))
    try:
        found = _find(RunFolder(Path(words[0])), LogQuery(**json.loads(words[1])), lambda: None)
    except (re.error, OverflowError, RecursionError) as error:
        found = {"error": str(error)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
