"""Read the output of Neptune's exporter (https://github.com/neptune-ai/neptune-exporter).

    data/<project>/<run>_part_<n>.parquet     a row for each attribute, or for each value of a series
    files/...                                 files, at the paths that the rows name

The exporter's `model.SCHEMA` defines the columns.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from paceline.errors import UserError
from paceline.runs import states
from paceline.trackers.imports.old_run import BrokenRun, OldFile, OldRun, Point, Problems, files_below, is_below

#: Type of an attribute in Neptune's export -> name of the column with the attribute's value.
_PARAMS = {
    "float": "float_value",
    "int": "int_value",
    "string": "string_value",
    "bool": "bool_value",
    "datetime": "datetime_value",
    "string_set": "string_set_value",
}
_SERIES = {"float_series": "float_value", "string_series": "string_value"}
_FILES = ("file", "file_series", "file_set", "artifact")
_OWN = "sys/"

_Row = Mapping[str, object]


def runs(path: Path) -> Iterator[OldRun | BrokenRun]:
    """Yield the runs of a Neptune export, or of its folder `data`."""
    try:
        from pyarrow import parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise UserError("Neptune's exports need pyarrow: pip install 'paceline[tabular]'.") from error
    data = path / "data" if (path / "data").is_dir() else path
    parts: dict[tuple[str, str], list[Path]] = {}
    found = sorted(data.rglob("*.parquet"))
    if not found:
        raise UserError(f"{str(path)!r} has no Parquet files. Name the folder into which Neptune's exporter wrote.")
    for file in found:
        try:
            keys = parquet.read_table(file, columns=["project_id", "run_id"]).group_by(["project_id", "run_id"])
            for row in keys.aggregate([]).to_pylist():
                parts.setdefault((str(row["project_id"]), str(row["run_id"])), []).append(file)
        except Exception as error:
            yield BrokenRun(file.name, f"it can't be read: {error}")
    for (project, run_id), files in parts.items():
        try:
            yield _run(project, run_id, files, data.parent / "files")
        except Exception as error:
            yield BrokenRun(f"{project}/{run_id}", f"it can't be read: {error}")


def _rows(files: list[Path], project: str, run_id: str, kinds: Iterable[str]) -> Iterator[_Row]:
    from pyarrow import parquet

    wanted = set(kinds)
    for file in files:
        for batch in parquet.ParquetFile(file).iter_batches():
            rows = (row for row in batch.to_pylist() if row["attribute_type"] in wanted)
            yield from (row for row in rows if (row["project_id"], row["run_id"]) == (project, run_id))


def _run(project: str, run_id: str, files: list[Path], top: Path) -> OldRun:
    problems = Problems()
    values: dict[str, object] = {}
    for row in _rows(files, project, run_id, _PARAMS):
        value = row.get(_PARAMS[str(row["attribute_type"])])
        values[str(row["attribute_path"])] = sorted(map(str, value)) if isinstance(value, (list, set)) else value
    created, changed = _seconds(values.get("sys/creation_time")), _seconds(values.get("sys/modification_time"))
    tags = values.get("sys/tags")
    return OldRun(
        key=f"{project}/{run_id}",
        experiment=project.rpartition("/")[2],
        name=values.get("sys/name") or values.get("sys/custom_run_id") or run_id,
        description=values.get("sys/description"),
        user=values.get("sys/owner"),
        state=states.FAILED if values.get("sys/failed") is True else states.COMPLETED,
        started_s=created,
        ended_s=changed,
        params={name: value for name, value in values.items() if not name.startswith(_OWN)},
        tags=dict.fromkeys(tags, "") if isinstance(tags, list) else {},
        points=_points_of(files, project, run_id, problems),
        files=lambda: _files(_rows(files, project, run_id, _FILES), top, problems),
        problems=problems,
    )


def _points_of(files: list[Path], project: str, run_id: str, problems: Problems) -> Callable[[], Iterable[Point]]:
    def points() -> Iterator[Point]:
        for row in _rows(files, project, run_id, (*_SERIES, "histogram_series")):
            column = _SERIES.get(str(row["attribute_type"]))
            if column is None:
                problems.note("left out a histogram", row["attribute_path"])
                continue
            step = row.get("step")
            yield Point(
                row["attribute_path"],
                row.get(column),
                None if step is None else float(str(step)),
                _seconds(row.get("timestamp")),
            )

    return points


def _files(rows: Iterable[_Row], top: Path, problems: Problems) -> Iterator[OldFile]:
    for row in rows:
        value = row.get("file_value")
        inside = value.get("path") if isinstance(value, dict) else None
        if not isinstance(inside, str) or not inside:
            problems.note("left out a file that is not in the export", row["attribute_path"])
        elif not is_below(top / inside, top):
            problems.note("left out a file whose path leaves the export", inside)
        else:
            step = row.get("step")
            name = f"outputs/{row['attribute_path']}" + ("" if step is None else f"/step_{float(str(step)):g}")
            if (top / inside).is_dir():
                yield from files_below(top / inside, name, problems)
            elif (top / inside).is_file():
                yield OldFile(f"{name}/{PurePosixPath(inside).name}", top, inside)
            else:
                problems.note("left out a file that is not in the export", row["attribute_path"])


def _seconds(value: object) -> float | None:
    if not isinstance(value, dt.datetime):
        return None
    return (value if value.tzinfo else value.replace(tzinfo=dt.timezone.utc)).timestamp()
