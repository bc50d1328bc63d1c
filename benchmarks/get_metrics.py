"""`get_metrics` of a run with a million values: under one name, under a hundred, and from four ranks."""

from __future__ import annotations

import subprocess
import sys

import paceline as pl
from common import in_turn, median, report, scratch
from paceline.runs.metrics import MetricLog

ROUNDS = 7
VALUES = 1_000_000

READ = """
import sys, time
import paceline as pl
run = pl.Workspace.from_config().get_run(sys.argv[1])
start = time.perf_counter()
metrics = run.get_metrics()
print(time.perf_counter() - start)
assert sum(map(len, metrics.values())) == int(sys.argv[2])
"""


def written(*, names: int, ranks: int) -> str:
    """The id of a new run with a million values in all."""
    with pl.Experiment(pl.Workspace.from_config(), "metrics").start_logging() as run:
        for rank in range(ranks):
            log = MetricLog(run.folder.metric_log(rank))
            for number in range(VALUES // ranks):
                log.scalar(f"metric_{number % names}", number * 0.1)
            log.close()
    return str(run.id)


def seconds_to_read(run_id: str) -> float:
    """What the call takes in a fresh interpreter."""
    command = [sys.executable, "-c", READ, run_id, str(VALUES)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    with scratch():
        runs = [written(names=1, ranks=1), written(names=100, ranks=1), written(names=1, ranks=4)]
        times = in_turn(ROUNDS, *(lambda run_id=run_id: seconds_to_read(run_id) for run_id in runs))
    one_name, hundred_names, four_ranks = map(median, times)
    report(
        "get_metrics",
        "get_metrics of 1 million values",
        "under 2 s",
        max(one_name, hundred_names, four_ranks) < 2,
        one_name_s=one_name,
        hundred_names_s=hundred_names,
        four_ranks_s=four_ranks,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
