"""Trials that their policy stops, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paceline as pl
from paceline.runs import states
from tests.sweeps.helpers import until

#: Trial 0 logs its values and waits; trial 1 comes to a better one later. Both save something when they are told to end.
SCRIPT = """
import argparse, os, signal, sys, time
import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--wait-for")
given = parser.parse_args()

def told(number, frame):
    with open("outputs/saved", "w") as file:
        file.write("whole")
    sys.exit(1)

signal.signal(signal.SIGTERM, told)
os.makedirs("outputs", exist_ok=True)
run = paceline.Run.get_context()
run.log("score", 0.5)
if given.x:
    while not os.path.exists(given.wait_for):
        time.sleep(0.05)
    run.log("score", given.x)
else:
    run.log("score", 0.5)
time.sleep(60)
"""


def test_a_running_trial_is_judged_again_when_a_better_curve_comes_later(submit: Any, tmp_path: Path) -> None:
    (tmp_path / "source" / "train.py").write_text(SCRIPT)
    go = tmp_path / "go"
    run = submit(
        {"x": pl.choice(0, 0.9)},
        sampler="grid",
        concurrent=2,
        stop=pl.Bandit(slack_factor=0.2),
        arguments=("--wait-for", str(go)),
    )
    until(lambda: [row["intervals"] for row in run.trial_rows()] == [2, 1])
    # It was judged with what there was, and nothing has come of it.
    assert not any(row["status"] in states.TERMINAL for row in run.trial_rows())
    go.touch()
    until(lambda: run.trial_rows()[0]["status"] == states.CANCELED)
    first = pl.Run(run.experiment, f"{run.id}_0")
    assert first.tags["stopped"] == (
        "Bandit: its best of 0.5 after 2 values is below 0.75, which the best of all, 0.9, leaves as slack"
    )
    # Its exit code is that of a failure, and it is none: it was told to end, had its grace, and keeps what it has made.
    assert first.record().failure is None
    assert (first.folder.outputs / "saved").read_text() == "whole"
    assert run.trial_rows()[1]["status"] == states.RUNNING
    run.cancel()
    until(lambda: run.record().is_terminal)
    assert run.best_child().id == f"{run.id}_1"
