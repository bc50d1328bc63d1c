"""Event files read, and `mlflow.log_metric` into a run: values a second, against MLflow's own store in SQLite.

    python benchmarks/trackers.py --mlflow-python path/to/an/environment/with/mlflow/bin/python

The plug-in's side needs mlflow-skinny in this environment, the event files tensorboard. Without an interpreter that has the
whole of MLflow the comparison is left out.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import paceline as pl
from common import in_turn, median, mlflow_interpreter, report, scratch
from log_rate import mlflow_rate
from paceline.trackers.event_file import EventFile
from paceline.trackers.export import event_writer

ROUNDS = 7
SCALARS = 500_000

WORKER = """
import time
import mlflow
with mlflow.start_run():
    mlflow.log_metric("loss", 0.0, step=0)
    start = time.perf_counter()
    for number in range(10_000):
        mlflow.log_metric("loss", number * 0.1, step=number + 1)
    rate = 10_000 / (time.perf_counter() - start)
with open("outputs/rate", "w") as file:
    file.write(str(rate))
"""


def made(folder: Path) -> Path:
    """An event file as torch's SummaryWriter writes it: five tags in turn."""
    write = event_writer(folder / "events")
    for number in range(SCALARS):
        write(f"train/metric_{number % 5}", number, number * 0.1, time.time())
    write(None, 0, 0.0, 0.0)
    (path,) = (folder / "events").iterdir()
    return path


def read_rate(path: Path) -> float:
    """Scalars a second of reading it whole."""
    start = time.perf_counter()
    count = sum(1 for _ in EventFile(path).new())
    assert count == SCALARS
    return count / (time.perf_counter() - start)


def plugin_rate(source: Path) -> float:
    """Calls a second of `mlflow.log_metric` in the worker of a run."""
    run = pl.Experiment(pl.Workspace.from_config(), "mlflow-rate").submit(
        pl.Estimator(source_directory=source, entry_script="worker.py")
    )
    run.wait_for_completion()
    assert len(run.metrics("loss")) == 10_001
    return float((run.folder.outputs / "rate").read_text())


def main() -> None:
    mlflow_python = mlflow_interpreter("Values a second of the trackers.")
    with scratch() as folder:
        path = made(folder)
        (events,) = in_turn(ROUNDS, lambda: read_rate(path))
        source = folder / "source"
        source.mkdir()
        (source / "worker.py").write_text(WORKER)
        sides = [lambda: plugin_rate(source)]
        if mlflow_python is not None:
            sides.append(lambda: mlflow_rate(mlflow_python, folder))
        ours, *others = in_turn(ROUNDS, *sides)
    report(
        "event_files",
        "event files read, scalars a second",
        "at least 100,000",
        median(events) >= 100_000,
        per_second=median(events),
        scalars=SCALARS,
        rounds=ROUNDS,
    )
    if not others:
        print(
            "MLflow's own store is not compared: name an interpreter that has it with --mlflow-python.", file=sys.stderr
        )
        return
    times = median(ours) / median(others[0])
    report(
        "mlflow_plugin",
        "mlflow.log_metric into a run, against its store in SQLite",
        "at least 2,500 a second, and 10 times",
        median(ours) >= 2_500 and times >= 10,
        ours_per_second=median(ours),
        sqlite_per_second=median(others[0]),
        times=times,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
