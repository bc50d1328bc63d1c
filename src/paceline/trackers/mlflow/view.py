"""Convert runs to MLflow's entities, for `mlflow ui` and for scripts."""

from __future__ import annotations

import math
from pathlib import Path

from mlflow.entities import Experiment, LifecycleStage, Metric, Param, Run, RunData, RunInfo, RunStatus, RunTag

from paceline.runs import read, series, states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import experiment_of
from paceline.runs.record import RunRecord, parse_utc
from paceline.runs.search.params import arguments_by_name
from paceline.runs.search.summaries import as_float

#: Id of the MLflow experiment for runs that have no experiment name.
DEFAULT = "0"
_STATUS = {
    states.COMPLETED: RunStatus.FINISHED,
    states.FAILED: RunStatus.FAILED,
    states.CANCELED: RunStatus.KILLED,
    **dict.fromkeys((states.NOT_STARTED, states.QUEUED, states.PREPARING, states.STARTING), RunStatus.SCHEDULED),
}
#: Cache: run's folder -> (name, size and time of each metric file; last value of each metric). Most runs don't change any more.
_last: dict[Path, tuple[list[tuple[str, int, int]], list[Metric]]] = {}


def experiment(name: str, runs_dir: Path, created_ms: int = 0) -> Experiment:
    """Return an MLflow experiment with `name` as its id and name."""
    return Experiment(
        experiment_id=name,
        name="Default" if name == DEFAULT else name,
        artifact_location=runs_dir.as_uri(),
        lifecycle_stage=LifecycleStage.ACTIVE,
        creation_time=created_ms,
        last_update_time=created_ms,
    )


def experiments(runs_dir: Path) -> list[Experiment]:
    """Return MLflow experiments with runs, most recently used first."""
    names: dict[str, str] = {}
    for run_id in store.ids(runs_dir):
        if (name := experiment_of(run_id)) is not None:
            names.setdefault(name, run_id)
    return [experiment(name, runs_dir, 1000 * _seconds(run_id)) for name, run_id in names.items()]


def status(state: str) -> int:
    """Return the MLflow status for a run's state."""
    return int(_STATUS.get(state, RunStatus.RUNNING))


def run(folder: RunFolder, record: RunRecord | None = None) -> Run:
    """Convert a run's current state to an MLflow `Run`."""
    record = read.record(folder) if record is None else record
    notes = tags_and_properties.read(folder.notes)
    name = notes.name or record.run_id
    info = RunInfo(
        run_id=record.run_id,
        experiment_id=record.experiment,
        user_id=record.submitted_by,
        status=RunStatus.to_string(status(record.status)),
        start_time=_ms(record.started_utc or record.created_utc) or 0,
        end_time=_ms(record.ended_utc),
        lifecycle_stage=LifecycleStage.ACTIVE,
        artifact_uri=folder.outputs.absolute().as_uri(),
        run_name=name,
    )
    tags = {key: value or "" for key, value in notes.tags.items()} | {
        "mlflow.runName": name,
        "mlflow.user": record.submitted_by,
        "mlflow.source.type": "JOB",
        "mlflow.source.name": " ".join(record.job.entry_words) if record.job else "",
        "mlflow.source.git.commit": str(record.git.get("commit") or ""),
        "mlflow.parentRunId": record.parent_run_id or "",
        "mlflow.note.content": notes.description or "",
        "paceline.status": record.status,
        "paceline.target": record.target or "",
    }
    data = RunData(
        metrics=last_metrics(folder),
        params=[Param(key, value) for key, value in (_parameters(record) | notes.properties).items()],
        tags=[RunTag(key, value) for key, value in tags.items() if value],
    )
    return Run(info, data)


def _latest(run_id: str, metric: series.MetricSeries) -> Metric | None:
    # Sort NaN before all other numbers.
    return max(
        _numbers(run_id, metric),
        key=lambda number: (number.step, number.timestamp, not math.isnan(number.value), number.value),
        default=None,
    )


def _numbers(run_id: str, metric: series.MetricSeries) -> list[Metric]:
    rows = zip(metric.steps, metric.values, metric.times, strict=True)
    return [
        Metric(metric.name, as_float(value), series.milliseconds(time), number if step is None else step, run_id=run_id)
        for number, (step, value, time) in enumerate(rows)
        if isinstance(value, (int, float))
    ]


def history(folder: RunFolder, name: str) -> list[Metric]:
    """Return all ranks' values of a metric as MLflow `Metric` objects."""
    return [
        number
        for metric in series.read(folder.metrics, name=name).values()
        for number in _numbers(folder.run_id, metric)
    ]


def last_metrics(folder: RunFolder) -> list[Metric]:
    """Return each metric's number with the greatest (step, time, value)."""
    stamp = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.metrics.glob("*"))
    kept = _last.get(folder.path)
    if kept is None or kept[0] != stamp:
        latest = (_latest(folder.run_id, metric) for metric in series.read(folder.metrics).values())
        kept = (stamp, [number for number in latest if number is not None])
        _last[folder.path] = kept
    return kept[1]


def _parameters(record: RunRecord) -> dict[str, str]:
    if record.job is None:
        return {}
    return {name.lstrip("-") or name: value for name, value in arguments_by_name(record.job.arguments).items()}


def _ms(utc: str | None) -> int | None:
    return int(parse_utc(utc).timestamp() * 1000) if utc else None


def _seconds(run_id: str) -> int:
    return next((int(part) for part in run_id.split("_")[1:] if part.isdecimal() and len(part) >= 10), 0)
