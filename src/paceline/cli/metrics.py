"""metrics: metrics of one run, or of several side by side."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli.common import count_ranks, folders_of, print_json, print_table, refuse
from paceline.cli.options import JSON, RUNS, VerbOption, takes
from paceline.errors import UserError
from paceline.runs import read, series, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import utc_at
from paceline.runs.series import MetricSeries
from paceline.runs.visible import visible
from paceline.system.names import did_you_mean
from paceline.system.units import value_text

if TYPE_CHECKING:
    from paceline.cli.outputs import RunMetrics

#: A table shows at most this many characters of a value that is not a number.
_LONGEST = 40


@takes(
    RUNS,
    VerbOption("--name", "Show all values of this metric; may be repeated.", "METRIC", list),
    VerbOption("--rank", "Only values that this worker logged; default: all.", type=int, least=0),
    VerbOption("--csv", "Print CSV.", type=bool, name="as_csv"),
    JSON,
)
def metrics(*, run_ids: list[str], name: list[str], rank: int | None, as_csv: bool, as_json: bool) -> None:
    """Show metrics of runs side by side. Shows last, least and greatest values; with --name, all values."""
    refuse(UserError, (as_csv and as_json, "--csv and --json: choose one of them."))
    folders = folders_of(run_ids)
    runs = {folder: _series_of(folder, rank) for folder in folders}
    if name:
        _check_names(name, runs, rank)
        runs = {folder: {key: found[key] for key in name if key in found} for folder, found in runs.items()}
    if as_json:
        print_json([_json(folder, found, whole=bool(name)) for folder, found in runs.items()])
    elif as_csv:
        _print_csv(runs, whole=bool(name))
    elif not any(runs.values()):
        by = f"by rank {rank} " if rank is not None else ""
        print(f"No metrics were logged {by}in {' and '.join(folder.run_id for folder in folders)}.")
    elif name:
        for number, key in enumerate(name):
            if len(name) > 1:
                print(f"{'' if number == 0 else chr(10)}{visible(key)}:")
            _print_series({folder: found.get(key, MetricSeries(name=key)) for folder, found in runs.items()})
    elif len(runs) == 1:
        (found,) = runs.values()
        rows = [
            (key, _text(one.last), _text(one.min), _text(one.max), _text(one.last_step), str(len(one)))
            for key, one in found.items()
        ]
        print_table(("METRIC", "LAST", "MIN", "MAX", "STEP", "VALUES"), rows)
    else:
        _print_side_by_side(runs)


def _series_of(folder: RunFolder, rank: int | None) -> dict[str, MetricSeries]:
    record = read.record(folder)  # reading the record also refreshes the folder of a remote run
    count_ranks(folder, record, rank)
    return series.read(folder.metrics, rank=rank)


def _check_names(names: Sequence[str], runs: Mapping[RunFolder, Mapping[str, MetricSeries]], rank: int | None) -> None:
    there = list(dict.fromkeys(key for found in runs.values() for key in found))
    for name in names:
        if name not in there:
            runs_text = " and ".join(folder.run_id for folder in runs)
            of = f" by rank {rank}" if rank is not None else ""
            has = f"There are {', '.join(there)}." if there else "Nothing was logged."
            raise UserError(f"--name {name!r}: no such metric in {runs_text}{of}.{did_you_mean(name, there)} {has}")


def _print_side_by_side(runs: Mapping[RunFolder, Mapping[str, MetricSeries]]) -> None:
    rows = []
    for key in dict.fromkeys(key for found in runs.values() for key in found):
        of_runs = [found.get(key, MetricSeries(name=key)) for found in runs.values()]
        rows.append((key, "last", *(_text(one.last) for one in of_runs)))
        # For a metric with a single value, print no minimum and maximum, because they are equal to the last value.
        if any(len(one) > 1 and one.min is not None for one in of_runs):
            rows.append(("", "min", *(_text(one.min) for one in of_runs)))
            rows.append(("", "max", *(_text(one.max) for one in of_runs)))
    print_table(("METRIC", "", *run_titles(list(runs))), rows)


def _print_series(runs: Mapping[RunFolder, MetricSeries]) -> None:
    if len(runs) == 1:
        (one,) = runs.values()
        print_table(("STEP", "TIME", "VALUE"), [(_text(step), _utc(time), _text(value)) for step, value, time in one])
        return
    by_step = all(None not in one.steps and len(set(one.steps)) == len(one) for one in runs.values())
    columns = [dict(zip(one.steps if by_step else range(len(one)), one.values, strict=True)) for one in runs.values()]
    places = sorted({place for column in columns for place in column if place is not None})
    rows = [(_text(place), *(_text(column.get(place)) for column in columns)) for place in places]
    print_table(("STEP" if by_step else "NUMBER", *run_titles(list(runs))), rows)


def run_titles(folders: Sequence[RunFolder]) -> list[str]:
    """Return the runs' display names if all are different, else their ids."""
    names = [tags_and_properties.read(folder.notes).name for folder in folders]
    # If runs have no names or equal names, use the runs' ids as titles of the columns.
    if None in names or len(set(names)) < len(names):
        return [folder.run_id for folder in folders]
    return [str(name) for name in names]


def _print_csv(runs: Mapping[RunFolder, Mapping[str, MetricSeries]], *, whole: bool) -> None:
    # End lines with \n instead of csv's \r\n, because many tools read the \r as a part of the last field.
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = ("step", "time_utc", "value") if whole else ("last", "min", "max", "last_step", "count")
    writer.writerow(("run_id", "metric", *columns))
    for folder, found in runs.items():
        for key, one in found.items():
            if whole:
                writer.writerows((folder.run_id, key, step, _utc(time), _plain(value)) for step, value, time in one)
            else:
                writer.writerow((folder.run_id, key, _plain(one.last), one.min, one.max, one.last_step, len(one)))


def _json(folder: RunFolder, found: Mapping[str, MetricSeries], *, whole: bool) -> RunMetrics:
    run: RunMetrics = {
        "run_id": folder.run_id,
        "display_name": tags_and_properties.read(folder.notes).name or folder.run_id,
    }
    if whole:
        run["series"] = {
            key: {
                "steps": [*one.steps],
                "values": [*one.values],
                "times_utc": [_utc(time) or None for time in one.times],
            }
            for key, one in found.items()
        }
    else:
        run["metrics"] = {
            key: {"last": one.last, "min": one.min, "max": one.max, "last_step": one.last_step, "count": len(one)}
            for key, one in found.items()
        }
    return run


def _text(value: Any) -> str:
    text = value_text(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _utc(time_s: float) -> str:
    try:
        return utc_at(time_s)
    except (ValueError, OverflowError, OSError):
        return ""  # NaN, infinite, or outside the years 1 to 9999
