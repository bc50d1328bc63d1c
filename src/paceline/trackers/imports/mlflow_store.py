"""MLflow's file store (`mlruns/`) and SQLite database, read without MLflow.

    mlruns/<experiment id>/meta.yaml                                 name, lifecycle_stage
    mlruns/<experiment id>/<run id>/meta.yaml                        status, start_time, end_time (ms), run_name, artifact_uri
                                   /metrics/<name>                   lines of  time in ms  value  step
                                   /params/<name>, tags/<name>       the value
                                   /artifacts/...

The schema of the database: https://github.com/mlflow/mlflow/blob/master/mlflow/store/tracking/dbmodels/models.py
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from paceline.errors import UserError
from paceline.runs import states
from paceline.trackers.imports.old_run import (
    UNFINISHED,
    BrokenRun,
    OldFile,
    OldRun,
    Point,
    Problems,
    files_below,
    is_below,
)

#: MLflow's state of a run -> Paceline's state. MLflow's file store contains numbers as states, and its database contains names.
_STATES = {
    **dict.fromkeys((3, "FINISHED"), states.COMPLETED),
    **dict.fromkeys((4, "FAILED"), states.FAILED),
    **dict.fromkeys((5, "KILLED"), states.CANCELED),
}
_OWN_TAGS = "mlflow."
#: MLflow's database can't store infinities. MLflow replaces them by this number and its negative.
_LARGEST = sys.float_info.max
_TOO_LARGE = 1 << 24


def runs(path: Path) -> Iterator[OldRun | BrokenRun]:
    """Yield the runs of MLflow's `mlruns`, its parent folder, or a database file."""
    if path.is_file():
        yield from _of_database(path)
        return
    top = path / "mlruns" if (path / "mlruns").is_dir() else path
    experiments = [place for place in sorted(top.iterdir()) if (place / "meta.yaml").is_file()]
    # Since MLflow 3.7, runs are by default in a database beside `mlruns`, and `mlruns` contains only the files of the runs.
    database = path / "mlflow.db" if experiments or top != path else top.parent / "mlflow.db"
    if database.is_file():
        yield from _of_database(database)
    elif not experiments:
        raise UserError(
            f"{str(path)!r} is no MLflow store: it has neither experiments nor mlflow.db. Name mlruns or the database."
        )
    for place in experiments:
        yield from _of_experiment(place, top)


# --- functions for MLflow's file store


def _of_experiment(place: Path, top: Path) -> Iterator[OldRun | BrokenRun]:
    try:
        meta = _meta(place)
    except Exception as error:
        yield BrokenRun(place.name, f"its meta.yaml can't be read: {error}")
        return
    name = str(meta.get("name") or place.name)
    if meta.get("lifecycle_stage") == "deleted":
        return
    for folder in sorted(place.iterdir()):
        if folder.is_symlink() or not folder.is_dir() or folder.name in ("models", "tags", "datasets", "traces"):
            continue
        try:
            meta = _meta(folder)
            if meta.get("lifecycle_stage") != "deleted":
                yield _of_folder(folder, name, meta, top)
        except Exception as error:
            yield BrokenRun(folder.name, f"it can't be read: {error}")


def _meta(folder: Path) -> dict[str, object]:
    found = yaml.safe_load(_small(folder / "meta.yaml"))
    if not isinstance(found, dict):
        raise ValueError(f"{str(folder / 'meta.yaml')!r} is no mapping")
    return found


def _small(path: Path) -> str:
    with open(path, "rb") as file:
        data = file.read(_TOO_LARGE)
    return data.decode("utf-8", "replace")


def _of_folder(folder: Path, experiment: str, meta: dict[str, object], top: Path) -> OldRun:
    problems = Problems()
    tags = _texts(folder / "tags", problems)

    def points() -> Iterator[Point]:
        for name, path in _named(folder / "metrics", problems):
            with open(path, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    words = line.split()
                    try:
                        yield Point(name, float(words[1]), int(words[2]) if len(words) > 2 else 0, int(words[0]) / 1000)
                    except (ValueError, IndexError, OverflowError):
                        problems.note("left out a line of a metric that can't be read", name)

    # Prefer the folder `artifacts` in the run's folder: if the store was moved, its metadata contains the old path.
    kept = folder / "artifacts"
    uri = meta.get("artifact_uri") if not kept.is_dir() else kept.as_uri()
    return _run(
        str(meta.get("run_id") or meta.get("run_uuid") or folder.name),
        experiment,
        meta,
        tags,
        _texts(folder / "params", problems),
        points,
        _files(uri, top, problems),
        problems,
    )


def _named(top: Path, problems: Problems) -> Iterator[tuple[str, Path]]:
    for file in files_below(top, "", problems):
        yield file.inside, top / file.inside


def _texts(top: Path, problems: Problems) -> dict[str, object]:
    return {name: _small(path) for name, path in _named(top, problems)}


# --- functions for MLflow's database


def _of_database(path: Path) -> Iterator[OldRun | BrokenRun]:
    try:
        with contextlib.closing(_opened(path)) as base:
            rows = base.execute(
                "SELECT r.run_uuid, e.name AS experiment, r.name AS run_name, r.status, r.start_time, r.end_time, r.user_id, "
                "r.artifact_uri FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id "
                "WHERE r.lifecycle_stage = 'active' AND e.lifecycle_stage = 'active' ORDER BY r.start_time, r.run_uuid"
            ).fetchall()
            for row in rows:
                key = str(row["run_uuid"])
                params, tags = (_pairs(base, table, key) for table in ("params", "tags"))
                problems = Problems()
                files = _files(row["artifact_uri"], path.parent, problems)
                yield _run(key, str(row["experiment"]), dict(row), tags, params, _values_of(path, key), files, problems)
    except sqlite3.Error as error:
        raise UserError(f"{str(path)!r} is no database of MLflow: {error}. Name mlruns or the database.") from error


def _pairs(base: sqlite3.Connection, table: str, key: str) -> dict[str, object]:
    return {
        str(name): value for name, value in base.execute(f"SELECT key, value FROM {table} WHERE run_uuid = ?", (key,))
    }


def _opened(path: Path) -> sqlite3.Connection:
    base = sqlite3.connect(f"file:{urllib.parse.quote(os.fspath(path.absolute()))}?mode=ro", uri=True)
    base.row_factory = sqlite3.Row
    base.text_factory = lambda data: data.decode("utf-8", "replace")
    return base


def _values_of(path: Path, key: str) -> Callable[[], Iterable[Point]]:
    def points() -> Iterator[Point]:
        with contextlib.closing(_opened(path)) as base:
            query = (
                "SELECT key, value, step, timestamp, is_nan FROM metrics WHERE run_uuid = ? ORDER BY timestamp, step"
            )
            for name, value, step, time_ms, is_nan in base.execute(query, (key,)):
                number = value * float("inf") if isinstance(value, float) and abs(value) >= _LARGEST else value
                time_s = time_ms / 1000 if isinstance(time_ms, int) else None
                yield Point(name, float("nan") if is_nan else number, step, time_s)

    return points


# --- functions for the file store and the database


def _run(
    key: str,
    experiment: str,
    meta: Mapping[str, object],
    tags: Mapping[str, object],
    params: Mapping[str, object],
    points: Callable[[], Iterable[Point]],
    files: Callable[[], Iterable[OldFile]],
    problems: Problems,
) -> OldRun:
    start, end = meta.get("start_time"), meta.get("end_time")
    status = meta.get("status")
    parent = tags.get("mlflow.parentRunId")
    return OldRun(
        key=key,
        experiment=experiment,
        name=meta.get("run_name") or tags.get("mlflow.runName"),
        description=tags.get("mlflow.note.content"),
        user=meta.get("user_id"),
        state=_STATES.get(status, UNFINISHED) if isinstance(status, (int, str)) else UNFINISHED,
        started_s=start / 1000 if isinstance(start, int) else None,
        ended_s=end / 1000 if isinstance(end, int) else None,
        parent=str(parent) if parent else None,
        params=params,
        tags={name: value for name, value in tags.items() if not name.startswith(_OWN_TAGS)},
        points=points,
        files=files,
        problems=problems,
    )


def _files(uri: object, top: Path, problems: Problems) -> Callable[[], Iterable[OldFile]]:
    """Return a function that lists a run's artifacts below the store `top`."""

    def files() -> Iterable[OldFile]:
        if not uri:
            return []
        parts = urllib.parse.urlsplit(str(uri))
        path = Path(urllib.parse.unquote(parts.path))
        # mlflow-artifacts:/... means a file in the folder `mlartifacts` in the working directory of the MLflow server.
        if parts.scheme == "mlflow-artifacts":
            path = top / "mlartifacts" / path.relative_to("/")
        if parts.scheme not in ("", "file", "mlflow-artifacts") or not is_below(top / path, top):
            problems.note("left out its files, which are not below the store", uri)
            return []
        return files_below(top / path, "outputs", problems)

    return files
