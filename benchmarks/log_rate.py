"""`run.log`: values a second of a worker, over ten million of them, and against MLflow's `log_metric` to SQLite.

    python benchmarks/log_rate.py --mlflow-python path/to/an/environment/with/mlflow/bin/python

Without an interpreter that has MLflow that comparison is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import paceline as pl
from common import in_turn, median, mlflow_interpreter, report, scratch

ROUNDS = 7
MILLIONS = 10

#: Logs in parts and leaves the values a second of each part.
WORKER = """
import json, sys, time
import paceline
parts, part = int(sys.argv[1]), int(sys.argv[2])
run = paceline.Run.get_context()
rates, number = [], 0
for _ in range(parts):
    start = time.perf_counter()
    for number in range(number, number + part):
        run.log("loss", number * 0.1)
    rates.append(part / (time.perf_counter() - start))
with open("outputs/rates.json", "w") as file:
    json.dump(rates, file)
"""

MLFLOW = """
import logging, sys, time, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import mlflow
mlflow.set_tracking_uri("sqlite:///" + sys.argv[1])
count = int(sys.argv[2])
with mlflow.start_run():
    mlflow.log_metric("loss", 0.0, step=0)
    start = time.perf_counter()
    for number in range(count):
        mlflow.log_metric("loss", number * 0.1, step=number + 1)
    print("rate", count / (time.perf_counter() - start))
"""


def log_rates(source: Path, *, parts: int, part: int) -> list[float]:
    """Values a second of each part, logged by the worker of a submitted run."""
    estimator = pl.Estimator(source_directory=source, entry_script="worker.py", script_params={str(parts): str(part)})
    run = pl.Experiment(pl.Workspace.from_config(), "log-rate").submit(estimator)
    run.wait_for_completion()
    rates: list[float] = json.loads((run.folder.outputs / "rates.json").read_text())
    run.folder.metric_log(0).unlink()  # ten million values are most of a gigabyte
    return rates


def mlflow_rate(python: str, folder: Path) -> float:
    """Calls a second of `mlflow.log_metric` to a SQLite database, over 100 calls."""
    command = [python, "-c", MLFLOW, str(folder / "mlflow.db"), "100"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    mlflow_python = mlflow_interpreter("Values a second of run.log.")
    with scratch() as folder:
        source = folder / "source"
        source.mkdir()
        (source / "worker.py").write_text(WORKER)
        sides = [lambda: log_rates(source, parts=1, part=200_000)[0]]
        if mlflow_python is not None:
            sides.append(lambda: mlflow_rate(mlflow_python, folder))
        ours, *others = in_turn(ROUNDS, *sides)
        long_run = log_rates(source, parts=MILLIONS, part=1_000_000)
    report(
        "log_rate",
        "run.log, values a second of a worker",
        "at least 50,000",
        median(ours) >= 50_000,
        per_second=median(ours),
        rounds=ROUNDS,
    )
    # Neither its end nor its middle may be slower: the slowest million against the first.
    ratio = min(long_run) / long_run[0]
    report(
        "log_rate_flat",
        f"run.log, the slowest of {MILLIONS} millions against the first",
        "flat: at least 0.9, and at least 50,000 a second",
        ratio >= 0.9 and min(long_run) >= 50_000,
        first_per_second=long_run[0],
        last_per_second=long_run[-1],
        slowest_per_second=min(long_run),
        ratio=ratio,
        rate_of_each_million=long_run,
    )
    if not others:
        print("MLflow is not compared: name an interpreter that has it with --mlflow-python.", file=sys.stderr)
        return
    times = median(ours) / median(others[0])
    report(
        "log_rate_mlflow",
        "run.log against mlflow.log_metric to SQLite",
        "at least 100 times",
        times >= 100,
        ours_per_second=median(ours),
        mlflow_per_second=median(others[0]),
        times=times,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
