"""A sweep of two-worker trials on this machine, against Ray Tune doing the same with its own workers.

Both draw 50 learning rates at random and have two trials at a time, of two workers each, which train the same small model with
torch's gloo and report its last loss (`sweep_ray_tune/work.py`). Of Ray, neither its start nor its end counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import paceline as pl
from common import in_turn, median, report, scratch

HERE = Path(__file__).parent / "sweep_ray_tune"


def ours_s(trials: int, concurrent: int) -> float:
    """Seconds from the submission to the sweep's end."""
    estimator = pl.PyTorch(
        source_directory=HERE, entry_script="train.py", process_count_per_node=2, distributed_backend="gloo"
    )
    sweep = pl.Sweep(
        estimator,
        {"--lr": pl.loguniform(1e-3, 1e-1)},
        metric="loss",
        goal="minimize",
        trials=trials,
        concurrent=concurrent,
    )
    before = time.monotonic()
    run = pl.Experiment(pl.Workspace.from_config(), "tuned").submit(sweep)
    # More often than `wait_for_completion` looks.
    while not run.record().is_terminal:
        time.sleep(0.05)
    took = time.monotonic() - before
    rows = run.trial_rows()
    assert [(row["status"], row["intervals"]) for row in rows] == [("Completed", 1)] * trials, rows
    return took


def theirs_s(folder: Path, trials: int, concurrent: int, python: str) -> float:
    """Seconds of `Tuner.fit`."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [python, str(HERE / "tune_side.py"), str(folder), str(trials), str(concurrent)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["whole"] == trials, told
    return float(told["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--concurrent", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="beside one that does not count")
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter with ray[tune,train] and torch")
    given = parser.parse_args()
    with scratch() as folder:
        ours, theirs = in_turn(
            given.rounds,
            lambda: ours_s(given.trials, given.concurrent),
            lambda: theirs_s(folder / "ray", given.trials, given.concurrent, given.ray_python),
        )
    ours_median, theirs_median = median(ours), median(theirs)
    report(
        "sweep_ray_tune",
        f"a sweep of {given.trials} two-worker trials on this machine, {given.concurrent} at a time, against Ray Tune with its "
        "own workers",
        "at least as quick",
        ours_median <= theirs_median,
        ours_s=round(ours_median, 2),
        theirs_s=round(theirs_median, 2),
        times=round(theirs_median / ours_median, 2),
    )


if __name__ == "__main__":
    main()
