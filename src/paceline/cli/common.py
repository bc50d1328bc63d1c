"""Helpers that several verbs use: runs by their ids, tables, colours, JSON."""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from paceline.errors import PipelineError, RunNotFoundError, SweepError, UserError
from paceline.runs import read, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import is_trial
from paceline.runs.metrics import json_safe
from paceline.runs.record import RunRecord, parse_utc
from paceline.runs.visible import visible
from paceline.system.names import did_you_mean, some
from paceline.workspace import Workspace

Item = TypeVar("Item")

#: Terminal colour codes of the prefixes of rank 0, 1 and so on. All are readable on a dark and on a light background.
_RANK_COLOURS = (36, 33, 32, 35, 34, 31)
WARNING_COLOUR = 33
#: Headers of table columns that show a run's state. The cells of these columns are coloured.
_STATE_HEADERS = ("STATUS", "STATE")
_STATE_COLOURS = {states.COMPLETED: 32, states.FAILED: 31, states.CANCELED: 33, states.RUNNING: 36}


def folder_of(run_id: str | None) -> RunFolder:
    """Return the run with this id or beginning of an id, by default the latest."""
    # Don't create the workspace, because a command that only reads should leave no folder behind.
    runs_dir = Workspace.from_config(create=False).runs_dir
    if run_id is not None:
        return store.find(runs_dir, run_id)
    if (latest := next(_newest_first(runs_dir), None)) is not None:
        return latest
    raise RunNotFoundError(f"there is no run in {str(runs_dir.parent)!r} yet. Start one with `paceline run SCRIPT`.")


def folders_of(run_ids: Iterable[str] | None) -> list[RunFolder]:
    """Return the runs with these ids, without duplicates. Default: the latest run."""
    return list(dict.fromkeys(folder_of(run_id) for run_id in run_ids or (None,)))


def count_ranks(folder: RunFolder, record: RunRecord, wanted: int | None) -> int:
    """Return the number of a run's ranks.

    Include ranks that the run's script has started. Raise UserError if the rank `wanted` does not exist.
    """
    count = len(folder.ranks(record.world_size))
    if wanted is not None and wanted >= count:
        has = f"ranks 0 to {count - 1}" if count > 1 else "rank 0 alone"
        raise UserError(f"--rank {wanted}: run {record.run_id} has {has}. Leave --rank out to see all.")
    return count


def with_children(run_id: str | None, kind: Literal["sweep", "pipeline"]) -> tuple[RunFolder, RunRecord]:
    """Return the sweep or pipeline with this id, and its record. Default: the latest."""
    wrong = SweepError if kind == "sweep" else PipelineError
    runs_dir = Workspace.from_config(create=False).runs_dir
    if run_id is not None:
        folder = store.find(runs_dir, run_id)
    else:
        # Check the raw record, which is the cheapest way to skip runs of other kinds.
        found = (each for each in _newest_first(runs_dir) if (read.raw(each) or {}).get(kind))
        if (latest := next(found, None)) is None:
            raise wrong(f"there is no {kind} in {str(runs_dir.parent)!r} yet. `paceline {kind} run` starts one.")
        folder = latest
    record = read.record(folder)
    if getattr(record, kind) is None:
        raise wrong(f"run {folder.run_id} is not a {kind}. `paceline {kind} run` starts one.")
    return folder, record


def _newest_first(runs_dir: Path) -> Iterator[RunFolder]:
    """Return all runs, newest first, without trials of sweeps and steps of pipelines."""
    return (RunFolder(runs_dir / run_id) for run_id in store.ids(runs_dir) if not is_trial(run_id))


def refuse(error: type[UserError], *rules: tuple[object, str]) -> None:
    """Raise `error` for the first rule (condition, text) whose condition is true."""
    for is_broken, text in rules:
        if is_broken:
            raise error(text)


def key_value(word: str, error: UserError) -> tuple[str, str]:
    """Split KEY=VALUE. Raise `error` if the key or the equals sign is missing."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise error
    return key, value


def print_json(value: object) -> None:
    """Print a value as JSON. NaN and the infinities become strings."""
    print(json.dumps(json_safe(value), indent=2))


def pairs_text(pairs: Mapping[str, Any]) -> str:
    """Return tags as text, such as "epochs=3, best"."""
    return ", ".join(key if value is None else f"{key}={value}" for key, value in pairs.items())


def has_colour(stream: IO[str]) -> bool:
    """Return whether to print colours, as NO_COLOR, FORCE_COLOR or else the terminal says."""
    if os.environ.get("NO_COLOR"):
        return False
    # Any value but the empty text counts, as https://no-color.org and https://force-color.org define.
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def coloured(text: str, code: int | None, on: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if on and text and code is not None else text


def rank_colour(rank: int) -> int:
    return _RANK_COLOURS[rank % len(_RANK_COLOURS)]


def state_named(text: str) -> str:
    """Return the run state that a `--status` value names, ignoring case."""
    for state in states.ALL:
        if state.lower() == text.lower():
            return state
    raise UserError(
        f"--status {text!r} is not a state.{did_you_mean(text.capitalize(), states.ALL)} There are {', '.join(states.ALL)}."
    )


def state_colour(status: str) -> int | None:
    # The state text of a hanging run is "Running, hangs since ...". Give it the colour of a warning.
    return WARNING_COLOUR if "hangs" in status else _STATE_COLOURS.get(status)


def print_list(
    found: Sequence[Item],
    columns: Mapping[str, Callable[[Item], str]],
    *,
    as_json: bool,
    to_json: Callable[[Item], Any],
    none: str,
) -> None:
    """Print items as JSON or as a table. `columns`: {title: cell of an item}. `none`: text for no items."""
    if as_json:
        print_json([to_json(item) for item in found])
    elif found:
        print_table([*columns], [[cell(item) for cell in columns.values()] for item in found])
    else:
        print(none)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. Control characters are visible, and states coloured on a terminal."""
    lines = [tuple(map(visible, row)) for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    colour = has_colour(sys.stdout)
    for number, line in enumerate(lines):
        # Pad the cells before colouring them, because colour codes take no space on the screen.
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        if number == 0:
            cells = [coloured(cell, 1, colour) for cell in cells]
        else:
            cells = [
                coloured(cell, state_colour(text), colour) if name in _STATE_HEADERS else cell
                for name, cell, text in zip(header, cells, line, strict=True)
            ]
        print("  ".join(cells).rstrip())


def columns(lines: Sequence[Sequence[str]], left: Container[str] = ()) -> list[str]:
    """Return a table's aligned lines. Columns with a header in `left` are left-aligned."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(lines[0], line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def print_fields(fields: Iterable[tuple[str, str | Sequence[str]]], *, width: int = 13, **colours: int | None) -> None:
    """Print "name: text" for each field. Fields with an empty text are skipped.

    A sequence prints a line for each of its texts. `colours` maps a name to the colour of its text's first word.
    """
    for name, text in fields:
        lines = [visible(line) for line in ([text] if isinstance(text, str) else text)]
        if any(lines):
            word, *rest = lines[0].split(" ", 1)
            lines[0] = " ".join([coloured(word, colours.get(name), has_colour(sys.stdout)), *rest])
            print(f"{name + ':' if name else '':<{width}}" + f"\n{'':<{width}}".join(lines))


def warn(text: str) -> None:
    """Print a line on standard error, with control characters shown."""
    print(visible(text, lines=True), file=sys.stderr, flush=True)


def warn_left_out(names: Sequence[str]) -> None:
    """Name special files and broken links that a command has left out."""
    if names:
        warn(f"Left out, because they are special files or broken links: {some(names, 5)}.")


def age(created_utc: str | None) -> str:
    """Return a time's age in words, such as "3 min ago"."""
    if not created_utc:
        return ""
    seconds = (dt.datetime.now(dt.timezone.utc) - parse_utc(created_utc)).total_seconds()
    units = ((86400, "d"), (3600, "h"), (60, "min"))
    ages = (f"{int(seconds // size)} {unit} ago" for size, unit in units if seconds >= size)
    return next(ages, f"{int(max(0, seconds))} s ago")
