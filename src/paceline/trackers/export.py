"""Export metrics to CSV, Parquet, TensorBoard's event files, or an MLflow server."""

from __future__ import annotations

import contextlib
import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from paceline.errors import UserError
from paceline.runs import artifacts, series
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import json_safe
from paceline.runs.search.summaries import as_float
from paceline.runs.series import MetricSeries
from paceline.trackers.relay import mlflow_name, mlflow_parts

COLUMNS = ("run_id", "metric", "step", "value", "time", "rank", "attempt")
#: MLflow's limit on the number of metrics in a request.
_BATCH = 1000
_ANSWER_S = 10.0

#: Key of a metric's value: its step, value, time, rank and attempt.
_Place = tuple[int | None, int | float | str, float, int, int]


def rows(folders: Sequence[RunFolder]) -> Iterator[tuple[int | float | str | None, ...]]:
    """Yield a row (`COLUMNS`: run_id, metric, step, ...) for each logged value."""
    for folder in folders:
        for name, metric in series.read(folder.metrics).items():
            for place in _places(metric):
                yield (folder.run_id, name, *place)


def _places(metric: MetricSeries) -> Iterator[_Place]:
    for step, value, time, rank, attempt in zip(
        metric.steps, metric.values, metric.times, metric.ranks, metric.attempts, strict=True
    ):
        if isinstance(value, (int, float, str)):
            yield step, value, time, rank, attempt


def to_csv(folders: Sequence[RunFolder], out: IO[str]) -> None:
    # End lines with LF. csv's default is CRLF, and many tools would read the CR as part of the last field.
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows(folders))


def to_parquet(folders: Sequence[RunFolder], path: Path) -> int:
    """Write runs' metrics to a Parquet file. Return the number of rows.

    Numbers are in the column `value`, texts in the column `text`.

    Raises:
        UserError: pandas or pyarrow is not installed.
    """
    try:
        import pandas
        import pyarrow  # type: ignore[import-untyped,unused-ignore]  # noqa: F401 - by which pandas writes it
    except ImportError as error:
        raise UserError("--to parquet needs pandas and pyarrow: pip install 'paceline[tabular]'.") from error
    frame = pandas.DataFrame(rows(folders), columns=[*COLUMNS])
    is_text = frame["value"].map(lambda value: isinstance(value, str))
    frame["text"] = frame["value"].where(is_text).astype("string")
    frame["value"] = pandas.to_numeric(frame["value"].mask(is_text), errors="coerce").astype("float64")
    frame["step"] = frame["step"].astype("Int64")
    frame["time"] = pandas.to_datetime(frame["time"].astype("float64"), unit="s", utc=True)
    frame.to_parquet(path, index=False)
    return len(frame)


def to_tensorboard(folders: Sequence[RunFolder], top: Path) -> list[Path]:
    """Write event files of runs, and return these files' folders.

    A folder is `<top>/<run id>`, with subfolders if several ranks have logged. A value without a step gets its index.

    Raises:
        UserError: tensorboard is not installed.
    """
    made = []
    for folder in folders:
        metrics = series.read(folder.metrics)
        ranks = sorted({rank for metric in metrics.values() for rank in metric.ranks})
        for rank in ranks:
            place = top / folder.run_id / f"rank_{rank}" if len(ranks) > 1 else top / folder.run_id
            write = event_writer(place)
            for name, metric in metrics.items():
                found = ((*place[:3],) for place in _places(metric) if place[3] == rank)
                mine = ((step, as_float(value), time) for step, value, time in found if not isinstance(value, str))
                for number, (step, value, time) in enumerate(mine):
                    write(name, number if step is None else step, value, time if math.isfinite(time) else 0.0)
            write(None, 0, 0.0, 0.0)
            made.append(place)
    return made


def event_writer(place: Path) -> Callable[[str | None, int, float, float], None]:
    """Return a writer of (tag, step, value, time) to an event file in `place`.

    A call with None as tag closes the file.

    Raises:
        UserError: tensorboard is not installed.
    """
    # TensorBoard does not load TensorFlow if this module exists. Loading TensorFlow would take ten seconds.
    sys.modules.setdefault("tensorboard.compat.notf", type(sys)("notf"))
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UserError("TensorBoard's event files need tensorboard: pip install 'paceline[tensorboard]'.") from error
    place.mkdir(parents=True, exist_ok=True)
    writer = EventFileWriter(str(place))

    def write(tag: str | None, step: int, value: float, time: float) -> None:
        if tag is None:
            writer.close()
        else:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=time, summary=summary))

    return write


def to_mlflow(folder: RunFolder, uri: str, experiment: str | None = None, *, files: bool = False) -> str:
    """Copy a run to an MLflow server, and return MLflow's run id.

    experiment: MLflow's experiment; default: the run's experiment. files: Whether to copy the run's outputs too.

    Raises:
        UserError: mlflow is not installed, or the server does not answer or refuses the run.
    """
    try:
        import mlflow
        from mlflow.entities import Metric

        from paceline.trackers.mlflow import view
    except ImportError as error:
        raise UserError("--to mlflow needs mlflow: pip install 'paceline[mlflow]'.") from error
    _check_answers(uri)
    run = view.run(folder)
    name = experiment or run.info.experiment_id
    run_id: str = ""
    try:
        client = mlflow.MlflowClient(uri)
        there = client.get_experiment_by_name(name)
        place = there.experiment_id if there is not None else client.create_experiment(name)
        tags = {**run.data.tags, "paceline.run_id": folder.run_id}
        made = client.create_run(place, run.info.start_time, run_name=run.info.run_name)
        run_id = made.info.run_id
        for params, some_tags in mlflow_parts(run.data.params, tags):
            client.log_batch(run_id, params=params, tags=some_tags)
        numbers = [
            Metric(mlflow_name(number.key), number.value, number.timestamp, number.step)
            for name in series.read(folder.metrics)
            for number in view.history(folder, name)
        ]
        for at in range(0, len(numbers), _BATCH):
            client.log_batch(run_id, metrics=numbers[at : at + _BATCH])
        if files:
            for file, path in artifacts.files(folder):
                client.log_artifact(run_id, str(path), file.rpartition("/")[0] or None)
        if run.info.end_time:
            client.set_terminated(run_id, run.info.status, run.info.end_time)
    except mlflow.MlflowException as error:
        with contextlib.suppress(mlflow.MlflowException):
            if run_id:
                client.set_terminated(run_id, "FAILED")
        raise UserError(f"--to mlflow: {uri} refuses run {folder.run_id}: {json_safe(str(error))}") from error
    return run_id


def _check_answers(uri: str) -> None:
    """Raise UserError if no MLflow server answers; MLflow would retry for four minutes."""
    if not uri.startswith(("http://", "https://")):
        return
    import socket
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(uri, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # a server has answered; MLflow's client will report whether it is an MLflow server
    except urllib.error.URLError as error:
        # Ignore certificate errors here, because MLflow's client uses its own settings for certificates.
        if isinstance(error.reason, (ConnectionRefusedError, TimeoutError, socket.gaierror)):
            raise UserError(
                f"--to mlflow: no server answers at {uri}: {error.reason.strerror or error.reason}. Start it, or correct -o."
            ) from error
    except (OSError, ValueError):
        return
