"""Helpers of several verbs: the workspace, a run by its id, plain tables, colours, JSON."""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from paceline.errors import PipelineError, RunNotFoundError, SweepError, UserError
from paceline.runs import read, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import is_trial
from paceline.runs.metrics import json_safe
from paceline.runs.record import RunRecord, parse_utc
from paceline.runs.visible import visible
from paceline.system.names import did_you_mean
from paceline.workspace import Workspace

#: Colours in the order in which ranks take them: readable on dark and light.
_RANK_COLOURS = (36, 33, 32, 35, 34, 31)
WARNING_COLOUR = 33
_STATE_COLOURS = {states.COMPLETED: 32, states.FAILED: 31, states.CANCELED: 33, states.RUNNING: 36}


def folder_of(run_id: str | None) -> RunFolder:
    """The run of this id (or its beginning), or the latest one that is no sweep's trial.

    Raises:
        RunNotFoundError: there is none.
    """
    # Not made: a verb that only looks leaves no folder where it happens to be called.
    runs_dir = Workspace.from_config(create=False).runs_dir
    if run_id is not None:
        return store.find(runs_dir, run_id)
    if (latest := next(_newest_first(runs_dir), None)) is not None:
        return latest
    raise RunNotFoundError(f"there is no run in {str(runs_dir.parent)!r} yet. Start one with `paceline run SCRIPT`.")


def folders_of(run_ids: Iterable[str] | None) -> list[RunFolder]:
    """The runs of these ids, or the latest where there are none. Each once, also where it is named by its id and by the
    beginning of it.
    """
    return list(dict.fromkeys(folder_of(run_id) for run_id in run_ids or (None,)))


def count_ranks(folder: RunFolder, record: RunRecord, wanted: int | None) -> int:
    """Return the number of the run's ranks, those included that its script has started itself.

    Raises:
        UserError: the wanted rank is none of them.
    """
    count = len(folder.ranks(record.world_size))
    if wanted is not None and wanted >= count:
        has = f"ranks 0 to {count - 1}" if count > 1 else "rank 0 alone"
        raise UserError(f"--rank {wanted}: run {record.run_id} has {has}. Leave --rank out to see all.")
    return count


def with_children(run_id: str | None, kind: Literal["sweep", "pipeline"]) -> tuple[RunFolder, RunRecord]:
    """The sweep or pipeline of this id (or its beginning), or the latest one, and its record.

    Raises:
        SweepError, PipelineError: there is none, or the run is another kind.
    """
    wrong = SweepError if kind == "sweep" else PipelineError
    runs_dir = Workspace.from_config(create=False).runs_dir
    if run_id is not None:
        folder = store.find(runs_dir, run_id)
    else:
        # Of a run of another kind this is as cheap as a look can be.
        found = (each for each in _newest_first(runs_dir) if (read.raw(each) or {}).get(kind))
        if (latest := next(found, None)) is None:
            raise wrong(f"there is no {kind} in {str(runs_dir.parent)!r} yet. `paceline {kind} run` starts one.")
        folder = latest
    record = read.record(folder)
    if getattr(record, kind) is None:
        raise wrong(f"run {folder.run_id} is no {kind}. `paceline {kind} run` starts one.")
    return folder, record


def _newest_first(runs_dir: Path) -> Iterator[RunFolder]:
    """The runs that are neither a sweep's trials nor a pipeline's steps."""
    return (RunFolder(runs_dir / run_id) for run_id in store.ids(runs_dir) if not is_trial(run_id))


def print_json(value: Any) -> None:
    """One JSON value on standard output; NaN and the infinities as strings."""
    print(json.dumps(json_safe(value), indent=2))


def pairs_text(pairs: Mapping[str, Any]) -> str:
    """ "epochs=3, best", of a tag without a value its name alone."""
    return ", ".join(key if value is None else f"{key}={value}" for key, value in pairs.items())


def has_colour(stream: IO[str]) -> bool:
    """Return True where output is to be coloured: on a terminal, unless NO_COLOR says no, and wherever FORCE_COLOR says yes."""
    if os.environ.get("NO_COLOR"):
        return False
    # https://no-color.org and https://force-color.org: any value but the empty one counts.
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def coloured(text: str, code: int | None, on: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if on and text and code is not None else text


def rank_colour(rank: int) -> int:
    return _RANK_COLOURS[rank % len(_RANK_COLOURS)]


def state_named(text: str) -> str:
    """The state of this name, in any case, for `--status`.

    Raises:
        UserError: there is none.
    """
    for state in states.ALL:
        if state.lower() == text.lower():
            return state
    raise UserError(
        f"--status {text!r} is no state.{did_you_mean(text.capitalize(), states.ALL)} There are {', '.join(states.ALL)}."
    )


def state_colour(status: str) -> int | None:
    # A run that hangs has more words.
    return WARNING_COLOUR if "hangs" in status else _STATE_COLOURS.get(status)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, status_column: int | None = None) -> None:
    """Columns under a header; in colour on a terminal, plain and unwrapped elsewhere. Control characters are shown."""
    lines = [tuple(map(visible, row)) for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    colour = has_colour(sys.stdout)
    for number, line in enumerate(lines):
        # Filled up before they are coloured, for the codes have letters that take no place on the screen.
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        if number == 0:
            cells = [coloured(cell, 1, colour) for cell in cells]
        elif status_column is not None:
            cells[status_column] = coloured(cells[status_column], state_colour(line[status_column]), colour)
        print("  ".join(cells).rstrip())


def columns(lines: Sequence[Sequence[str]], left: Container[str] = ()) -> list[str]:
    """Each line's cells in columns: numbers to the right, what is under one of the headers `left` to the left."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(lines[0], line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def print_fields(fields: Iterable[tuple[str, str | Sequence[str]]], *, width: int = 13, **colours: int | None) -> None:
    """A name and its text a line, those without a text left out. Control characters are shown.

    A text of several lines is a sequence of them. colours: name -> colour of the text's first word.
    """
    for name, text in fields:
        lines = [visible(line) for line in ([text] if isinstance(text, str) else text)]
        if any(lines):
            word, *rest = lines[0].split(" ", 1)
            lines[0] = " ".join([coloured(word, colours.get(name), has_colour(sys.stdout)), *rest])
            print(f"{name + ':' if name else '':<{width}}" + f"\n{'':<{width}}".join(lines))


def warn(text: str) -> None:
    """A line of ours on standard error, with control characters of other people's text in it shown."""
    print(visible(text, lines=True), file=sys.stderr, flush=True)


def age(created_utc: str | None) -> str:
    """Return the time since then as people say it: "3 min ago"."""
    if not created_utc:
        return ""
    seconds = (dt.datetime.now(dt.timezone.utc) - parse_utc(created_utc)).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(max(0, seconds))} s ago"
