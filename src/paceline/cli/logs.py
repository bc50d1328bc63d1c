"""logs: what the workers print."""

from __future__ import annotations

import datetime as dt
import json
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.children import child
from paceline.cli.common import count_ranks, folder_of, refuse
from paceline.cli.options import LATEST_RUN, VerbOption, takes
from paceline.cli.view import RunView
from paceline.errors import UserError
from paceline.runs import controllers, read
from paceline.runs.follow import Show
from paceline.runs.log_start import LogStart, last_lines_start, moment_start, tail_offset
from paceline.runs.logs import LineAssembler, LogLine, lines_of
from paceline.runs.visible import TerminalLines, visible_line
from paceline.system import gaps, units

if TYPE_CHECKING:
    from paceline.cli.outputs import LogLineJson

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")

#: Matches the UTC time at the beginning of a line of the supervisor's log.
_STAMP = re.compile(rb"(\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2})Z ")


def _line_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        raise click.BadParameter(f"{text!r} must be a number of lines. With -f, 0 prints only new lines.")
    return int(text)


@takes(
    LATEST_RUN,
    VerbOption("-f --follow", "Follow the log until the run ends.", type=bool),
    VerbOption("-n --tail", "Only the last N lines, and with -f all new ones.", "N", _line_count),
    VerbOption("--since", "Only lines since then: 10m or 2h ago, or a time such as 2026-05-01T12:00.", "WHEN"),
    VerbOption("--rank", "Only this worker's log, byte for byte unless followed.", type=int, least=0),
    VerbOption("--attempt", "Only this attempt; default: all.", type=int, least=1),
    VerbOption("--driver", "The log of the supervisor and mpirun instead.", type=bool),
    VerbOption("--prepare", "The log of the preparation and of storing outputs instead.", type=bool),
    VerbOption("--raw", "On a terminal, keep control sequences that move the cursor or set the title.", type=bool),
    VerbOption("--json", "Print a JSON object for each line: attempt, rank, text.", type=bool, name="as_json"),
)
def logs(
    *,
    run_id: str | None,
    follow: bool,
    tail: int | None,
    since: str | None,
    rank: int | None,
    attempt: int | None,
    driver: bool,
    prepare: bool,
    raw: bool,
    as_json: bool,
) -> None:
    """Print the logs of a run's workers. With several workers, each line begins with its rank."""
    refuse(
        UserError,
        (follow and attempt is not None, f"--follow shows all attempts; leave out --attempt {attempt}, or --follow."),
        (follow and driver, "--follow goes with the workers' lines; leave it out, or --driver."),
        (follow and prepare, "--follow goes with the workers' lines; leave it out, or --prepare."),
    )
    since_s = _moment(since) if since is not None else None
    folder = folder_of(run_id)
    record = read.record(folder)
    size = count_ranks(folder, record, rank)
    # If the output goes to a file or a pipe, write the worker's bytes unchanged.
    as_is = raw or not sys.stdout.isatty()
    if driver or controllers.is_controlled(record):
        if follow:
            child.follow_log(folder, lambda line: print(visible_line(line), flush=True))
            return
        offset = 0 if since_s is None else driver_offset(folder.driver_log, since_s)
        print_parts([LogPart(folder.driver_log, offset)], tail, as_is=as_is)
        return
    if prepare:
        refuse(UserError, (since is not None, f"--since {since}: lines of --prepare carry no time. Use --tail N."))
        nodes = record.job.node_count if record.job else 1
        parts = [LogPart(folder.prepare_log(node_rank)) for node_rank in range(nodes)]
        print_parts(parts, tail, as_is=as_is)
        return
    count = len(record.attempts)
    refuse(UserError, ((attempt or 0) > max(1, count), f"--attempt {attempt}: run {record.run_id} has {count} so far."))
    attempts = [one for one in record.attempts if attempt in (None, one.number)]
    ranks = [rank] if rank is not None else [*range(size)]
    start: LogStart | None = LogStart(attempts[0].number if attempts else 1)
    if since_s is not None:
        start = moment_start(folder, attempts, ranks, since_s)
    if tail is not None and start is not None:
        numbers = [one.number for one in attempts]
        # If both --since and --tail are given, begin at the later of their two positions.
        start = start.later(last_lines_start(folder, numbers, ranks, tail, unended=not follow))
    if start is None:
        if not follow or record.is_terminal:
            return
        # No line is as recent as --since, so begin at the end of the log and print only new lines.
        start = last_lines_start(folder, [one.number for one in attempts], ranks, 0)
    # Copy the log of a single worker byte for byte, because its lines need not be merged with other workers' lines.
    if rank is not None and not follow and not as_json and as_is:
        offsets = {start.attempt: start.offsets.get(rank, 0)}
        numbers = [one.number for one in attempts if one.number >= start.attempt]
        parts = [LogPart(folder.rank_log(number, rank), offsets.get(number, 0)) for number in numbers]
        print_parts(parts, as_is=True)
        return
    # Print the rank before each line unless the user has selected a single worker.
    view = RunView(0 if rank is not None else size, quiet=True, attempts=len(record.attempts), raw=raw)
    line = _print_json_line if as_json else view.line
    if follow:
        chosen = ranks if rank is not None else None
        Show(folder, line=line, state=lambda record: None, ranks=chosen, start=start, last=tail).to_the_end()
        return
    # A log may have a gigabyte, so copy whole blocks if lines are neither counted nor cleaned for a terminal.
    in_blocks = tail is None and not as_json and not sys.stdout.isatty()
    lines = lines_of(folder, [one.number for one in attempts], ranks, start, in_blocks=in_blocks)
    # `start` may be some lines too early, so print only the last `tail` lines.
    for found in lines if tail is None else deque(lines, maxlen=tail):
        line(found)


def _moment(text: str) -> float:
    """Parse a time, or a duration before now, to seconds since 1970."""
    now = time.time()
    try:
        if not _DATE.match(text):
            return now - units.seconds(text)
        # A time without a time zone counts as local time, as is usual on a command line.
        found = dt.datetime.fromisoformat(text.strip().replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        raise UserError(
            f"--since {text!r} is neither a duration, such as 10m or 2h, nor a time, such as 2026-05-01T12:00 or "
            "2026-05-01T10:00:00Z."
        ) from None
    if found > now:
        raise UserError(f"--since {text}: that is still to come. Give a time that has passed.")
    return found


def _print_json_line(line: LogLine) -> None:
    found: LogLineJson = {"attempt": line.attempt, "rank": line.rank, "text": line.text}
    print(json.dumps(found), flush=True)


@dataclass(frozen=True)
class LogPart:
    """The part of a log file from an offset to the file's end."""

    path: Path
    offset: int = 0


def print_parts(parts: Sequence[LogPart], tail: int | None = None, *, as_is: bool) -> None:
    """Print logs one after another, or only the last `tail` lines of all.

    With `as_is` the bytes are printed unchanged. Otherwise control sequences, which a terminal would execute, are
    removed from the lines.
    """
    if tail is not None:
        parts = _last(parts, tail)
    for part in parts:
        # Flush the buffer of `print` before writing bytes directly. Otherwise the output would be in the wrong order.
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
        # The worker may not have started yet, or another process may have removed the run.
        except FileNotFoundError:
            continue
    sys.stdout.flush()


def driver_offset(path: Path, since_s: float) -> int:
    """Return the offset of the first line since a time in the supervisor's log.

    A line without a time, such as mpirun's, gets the time of the preceding line. `since_s` is in seconds since 1970.
    """
    offset = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                if stamp := _STAMP.match(line):
                    at = dt.datetime.fromisoformat(stamp[1].decode()).replace(tzinfo=dt.timezone.utc)
                    if at.timestamp() + 1 > since_s:  # add a second, because times in this log have whole seconds
                        break
                offset += len(line)
    except OSError:
        return 0
    return offset


def _last(parts: Sequence[LogPart], count: int) -> list[LogPart]:
    kept = []
    # If the newest log has fewer than the requested lines, take more lines from the log before it.
    for part in reversed(parts):
        kept.append(replace(part, offset=max(part.offset, tail_offset(part.path, count))))
        count -= _count_lines(kept[-1])
    return kept[::-1]


def _count_lines(part: LogPart) -> int:
    try:
        with open(part.path, "rb") as file:
            file.seek(part.offset)
            return sum(1 for _ in file)
    except OSError:
        return 0
