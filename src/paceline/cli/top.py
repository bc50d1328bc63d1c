"""top, stacks, profile: what a run's nodes and workers use, and where their time goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from paceline.cli.common import columns, folder_of, print_json
from paceline.cli.options import JSON, LATEST_RUN, VerbOption, takes
from paceline.errors import RunStateError, UserError
from paceline.observe import loads
from paceline.observe.profile import RATE, SECONDS
from paceline.observe.profile import take as sample
from paceline.observe.stacks import take
from paceline.observe.stragglers import RunPace
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, duration_text, hang_status
from paceline.runs.visible import visible
from paceline.system.signals import handled

if TYPE_CHECKING:
    from paceline.cli.outputs import LoadSample, RunLoad

_INTERVAL_S = 2.0
_LEAST_S, _MOST_S = 0.5, 3600.0
#: Terminal codes: go to the top left, clear the rest of a line or screen, hide or show the cursor, switch between two screens.
_HOME, _LINE, _BELOW, _HIDE, _SHOW = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[?25l", "\x1b[?25h"
_ALTERNATE, _BACK = "\x1b[?1049h", "\x1b[?1049l"
#: Headers of the table columns whose cells are aligned to the left.
_NAMES = ("NODE", "RANK")
#: While nothing is drawn, check for signals after each pause of this many seconds.
_PAUSE_S = 0.1


@takes(
    LATEST_RUN,
    VerbOption("--once", "Print once and exit.", type=bool),
    VerbOption("--interval", "Seconds between two refreshes.", "SECONDS", float, default=_INTERVAL_S),
    JSON,
)
def top(*, run_id: str | None, once: bool, interval: float, as_json: bool) -> int:
    """Watch the load of a run's nodes and workers.

    Shows processors (100 % is one core), memory, GPUs, disk, network, steps, and the shares of time in which a rank computes,
    waits for data and waits for other ranks. Ctrl-C ends it. Without a terminal it prints once.
    """
    if not _LEAST_S <= interval <= _MOST_S:
        raise UserError(f"--interval {interval:g}: give a number of seconds from {_LEAST_S:g} to {_MOST_S:g}.")
    folder = folder_of(run_id)
    if as_json:
        print_json(_told(folder, read.record(folder)))
        return 0
    is_live = not once and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
    if not is_live:
        print("\n".join(_lines(folder, read.record(folder))))
        return 0
    return _live(folder, interval)


def _live(folder: RunFolder, interval_s: float) -> int:
    with _screen(sys.stdout) as ended:
        while not ended:
            record = read.record(folder)
            # Leave room for the heading, the list of slow ranks and the blank lines.
            lines = _lines(folder, record, most_rows=max(6, shutil.get_terminal_size().lines - 10))
            _draw(lines)
            if record.is_terminal:
                break
            until = time.monotonic() + interval_s
            while not ended and time.monotonic() < until:
                time.sleep(_PAUSE_S)
    # The live view used a separate screen, which is gone now. Print the last state on the normal screen.
    print("\n".join(lines))
    return 128 + ended[0] if ended else 0


def _draw(lines: list[str]) -> None:
    size = shutil.get_terminal_size()
    # Draw only the lines that fit. More lines would scroll the screen, and the next state could not overwrite them.
    shown = [line[: size.columns] for line in lines[: max(1, size.lines - 1)]]
    sys.stdout.write(_HOME + "".join(f"{line}{_LINE}\r\n" for line in shown) + _BELOW)
    sys.stdout.flush()


@contextlib.contextmanager
def _screen(stream: IO[str]) -> Iterator[list[int]]:
    """Show a terminal's second screen during the block. Yield the list of received signals."""
    ended: list[int] = []
    # Set a handler for SIGINT, because some shells start background programs with SIGINT ignored.
    with handled(lambda number, frame: ended.append(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        try:
            stream.write(_ALTERNATE + _HIDE)
            yield ended
        finally:
            with contextlib.suppress(OSError, ValueError):  # the terminal may have been closed
                stream.write(_SHOW + _BACK)
                stream.flush()


def _told(folder: RunFolder, record: RunRecord) -> RunLoad:
    sample = loads.last(folder)
    none: LoadSample = {"time": None, "nodes": {}, "ranks": {}, "pace": None}
    return {"run_id": record.run_id, "status": record.status, **cast("LoadSample", sample or none)}


def _lines(folder: RunFolder, record: RunRecord, *, most_rows: int | None = None) -> list[str]:
    """Return tables of nodes and ranks as lines, with at most `most_rows` rows.

    Slow ranks are always among the rows.
    """
    took = (
        f" for {duration_text(record.duration_s)}" if record.duration_s is not None and not record.is_terminal else ""
    )
    head = f"{record.run_id}  {hang_status(record)}{took}"
    sample = loads.last(folder)
    if sample is None or not any(load.keys() - {"name"} for load in sample["nodes"].values()):
        if record.status in states.TERMINAL:
            raise RunStateError(
                f"run {record.run_id} is {record.status}, and nothing was sampled of it: it was too short, or "
                "PACELINE_SAMPLE_SECONDS was 0, or its nodes do not tell."
            )
        return [head, "Nothing was sampled yet: the first sample comes some seconds after the workers have started."]
    age_s = max(0.0, time.time() - float(sample["time"]))
    if record.is_terminal:
        head += "; the last sample:"
    elif age_s > 3 * float(sample["every_s"]) + 10:
        head += f"; the last sample is {duration_text(age_s)} old"
    straggler = RunPace.from_json(sample["pace"]).straggler
    slow = {straggler.node, *map(str, straggler.ranks)} if straggler is not None else set()
    nodes, ranks = loads.node_rows(sample), loads.rank_rows(sample)
    most_nodes = most_rows and max(most_rows // 3, most_rows - len(ranks))
    lines = [head, *_table(loads.NODE_HEADER, nodes, slow, most_nodes)]
    if ranks:
        lines += _table(loads.RANK_HEADER, ranks, slow, most_rows and most_rows - min(len(nodes), most_nodes or 0))
    if straggler is not None:
        lines += ["", straggler.text(is_over=record.is_terminal)]
    return [visible(line) for line in lines]


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]], slow: set[str], most: int | None) -> list[str]:
    first = sorted(rows, key=lambda row: row[0] not in slow)[:most]
    kept = [row for row in rows if row in first]
    more = [f"{len(rows) - len(kept):,} more rows: paceline top --once"] if len(kept) < len(rows) else []
    return ["", *columns(loads.shown_columns(header, kept), left=_NAMES), *more]


@takes(
    LATEST_RUN,
    VerbOption("--native", "Include frames of C and C++, by py-spy, which stops each process for a moment.", type=bool),
    JSON,
)
def stacks(*, run_id: str | None, native: bool, as_json: bool) -> None:
    """Show where each worker of a run is now.

    Prints the stacks of its threads, and which ranks wait for which. Equal stacks of several ranks are shown once, with the
    ranks. The workers continue.
    """
    found = take(folder_of(run_id), native=native)
    if as_json:
        print_json(found.to_json())
    else:
        print(visible(str(found), lines=True))


@takes(
    LATEST_RUN,
    VerbOption("--seconds", "Seconds to sample.", "N", float, default=SECONDS),
    VerbOption("--rate", "Samples a second.", "N", float, default=RATE),
    VerbOption("-o --output", "File for all samples; default: RUN.speedscope.json.", "FILE", Path),
    JSON,
)
def profile(*, run_id: str | None, seconds: float, rate: float, output: Path | None, as_json: bool) -> None:
    """Sample a run's workers, to see where they spend their time.

    Prints the ten functions that take the most time, for each rank if ranks differ. Writes all samples to a file for
    https://www.speedscope.app. Uses py-spy if installed and allowed, else signals, which see only main threads.
    """
    folder = folder_of(run_id)
    target = output or Path(f"{folder.run_id}.speedscope.json")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise UserError(f"--output {str(target)!r}: name a file in a folder that exists.")
    found = sample(folder, seconds=seconds, rate=rate)
    found.save(target)
    if as_json:
        print_json({**found.to_json(), "file": str(target)})
        return
    print(visible(str(found), lines=True))
    print(f"\nAll samples: {visible(str(target))}. Open it at https://www.speedscope.app; it stays in your browser.")
