"""SIGKILL of a sweep's controller, again and again: as it loads, as it makes a trial, as it waits, as it writes the end.

No trial is lost, none runs twice, each has the point that an unbroken sweep gives it, and the best is that of the children.
3 kills here, 200 with `make chaos`. A failure prints the seed that repeats it (PACELINE_CHAOS_SEED).
"""

from __future__ import annotations

import contextlib
import csv
import os
import random
import signal
import time
from pathlib import Path

import pytest

import paceline as pl
from paceline.runs import states
from paceline.sweeps.samplers.sampler import RandomSampler
from paceline.sweeps.sweep_run import SweepRun
from paceline.system import detached_process, processes
from tests.helpers import write_tree

KILLS = int(os.environ.get("PACELINE_SWEEP_KILLS", "3"))
SEED = int(os.environ.get("PACELINE_CHAOS_SEED", str(random.SystemRandom().randrange(1 << 30))))

#: Time limit in seconds, which only keeps the test from hanging.
PATIENCE_S = 300 + 10 * KILLS

#: This trial script creates a file named after its number and logs a value.
SCRIPT = """
import os, sys
import paceline

run = paceline.Run.get_context()
with open(os.path.join(sys.argv[1], run.id.rpartition("_")[2]), "a") as ran:
    ran.write("x")
run.log("score", float(sys.argv[sys.argv.index("--x") + 1]))
"""


@pytest.mark.promise("controller-killed-goes-trial-lost")
@pytest.mark.timeout(PATIENCE_S + 120)
def test_each_trial_runs_once_even_if_the_sweep_controller_is_killed_repeatedly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    source = random.Random(SEED)
    write_tree(tmp_path / "source", {"train.py": SCRIPT})
    ran = tmp_path / "ran"
    ran.mkdir()
    estimator = pl.Estimator(tmp_path / "source", entry_script="train.py", arguments=[str(ran)])
    sweep = pl.Sweep(estimator, {"x": pl.uniform(0, 1)}, metric="score", trials=4, concurrent=2, seed=7)
    run = pl.Experiment(pl.Workspace(tmp_path / ".paceline"), "chaos").submit(sweep)
    assert isinstance(run, SweepRun)
    kills = in_a_row = 0
    killed_at: float | None = None
    went_on: list[float] = []
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline, f"seed {SEED}: {kills} kills, and the sweep has not ended: {run.record()}"
        # Reading the record starts a new sweep controller, here from this process, if the last controller was killed.
        record = run.record()
        if record.is_terminal:
            assert record.status == states.COMPLETED, f"seed {SEED}: {record.failure}"
            if kills == KILLS:
                break
            run.more(4)
            continue
        controller = detached_process.started[-1].pid
        has_begun = record.owner.get("pid") == controller
        if has_begun and killed_at is not None:
            went_on.append(time.monotonic() - killed_at)
            killed_at = None
        # Kill at most two controllers in a row before they begin, because Paceline gives up after three controllers
        # that could not start.
        is_victim = has_begun or (in_a_row < 2 and source.random() < 0.05)
        if kills < KILLS and is_victim and processes.is_alive(controller):
            in_a_row = 0 if has_begun else in_a_row + 1
            # Most kills come soon after the start, while the controller reads the existing trials and creates new ones.
            time.sleep(source.random() ** 3 if has_begun else 0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(controller, signal.SIGKILL)
            kills += 1
            killed_at = killed_at or time.monotonic()
        time.sleep(0.02)
    took = sorted(went_on)
    print(f"{kills} kills; a controller had begun again after {took[len(took) // 2]:.2f} s, at most {took[-1]:.2f} s")

    rows = run.trial_rows()
    count = run.spec.trials
    assert [row["trial"] for row in rows] == list(range(count)), f"seed {SEED}"
    assert {row["status"] for row in rows} == {states.COMPLETED}, f"seed {SEED}: {rows}"
    assert {path.name: path.read_text() for path in ran.iterdir()} == {str(n): "x" for n in range(count)}, (
        f"seed {SEED}"
    )
    sampler, space = RandomSampler(run.spec.space, 7), run.spec.space
    unbroken = [space.values(p.chosen)["x"] for number in range(count) if (p := sampler.propose(number, ()))]
    assert [row["x"] for row in rows] == [row["score"] for row in rows] == unbroken, f"seed {SEED}"
    assert run.best_child().get_metrics()["score"] == max(unbroken)
    with (run.folder.outputs / "trials.csv").open() as table:
        assert [float(row["x"]) for row in csv.DictReader(table)] == unbroken
    left = [path.name for path in run.folder.path.parent.iterdir() if path.name.startswith(".")]
    assert left == [], f"seed {SEED}"
