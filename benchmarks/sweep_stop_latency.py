"""From a metric's line to the SIGTERM of a trial that has to stop."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import paceline as pl
from common import median, report, scratch

ROUNDS = 20
MOST_S = 1.0
#: The first trial is good and stays; each of the others writes down when it logs a value that is too bad, and when SIGTERM comes.
SCRIPT = """
import argparse, pathlib, signal, sys, time
import paceline
parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--marks", type=pathlib.Path)
given = parser.parse_args()
run = paceline.Run.get_context()
mark = given.marks / f"{run.id}.txt"
if given.x > 0.5:
    run.log("score", given.x)
    while not (given.marks / "end").exists():
        time.sleep(0.05)
    sys.exit()
logged = 0.0
def stopped(*_):
    beside = mark.with_suffix(".new")
    beside.write_text(repr(time.time() - logged))
    beside.rename(mark)
    sys.exit(1)
signal.signal(signal.SIGTERM, stopped)
time.sleep(0.5)
logged = time.time()
run.log("score", given.x)
time.sleep(60)
"""


def main() -> None:
    with scratch() as folder:
        (folder / "source").mkdir()
        (folder / "source" / "train.py").write_text(SCRIPT)
        marks = folder / "marks"
        marks.mkdir()
        estimator = pl.Estimator(
            source_directory=folder / "source", entry_script="train.py", arguments=["--marks", str(marks)]
        )
        sweep = pl.Sweep(
            estimator,
            {"x": pl.uniform(0, 1)},
            metric="score",
            trials=ROUNDS + 1,
            concurrent=4,
            points=[{"x": 0.9}, *({"x": 0.1} for _ in range(ROUNDS))],
            stop=pl.Bandit(slack_amount=0.2),
        )
        run = pl.Experiment(pl.Workspace.from_config(), "stopped").submit(sweep)
        found = times(marks)
        (marks / "end").touch()
        run.wait_for_completion()
    report(
        "sweep_stop_latency",
        "a metric's line to the SIGTERM of a trial that has to stop",
        f"at most {MOST_S:g} s",
        max(found) <= MOST_S,
        worst_s=max(found),
        median_s=median(found),
        rounds=len(found),
    )


def times(marks: Path) -> list[float]:
    deadline = time.monotonic() + 300
    while len(found := list(marks.glob("*.txt"))) < ROUNDS:
        assert time.monotonic() < deadline, f"{len(found)} of {ROUNDS} trials were stopped"
        time.sleep(0.1)
    return [float(path.read_text()) for path in found]


if __name__ == "__main__":
    sys.exit(main())
