"""Sweeps of two-node trials on each kind of target: run, judged, canceled, and gone on with when a host is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from paceline.sweeps.sweep_run import SweepRun
from paceline.targets.configured import Configured, add, read
from tests.engines.hosts import Hosts
from tests.engines.places import TWO, WAYS, Place, place
from tests.engines.ray_lab import RayLab
from tests.engines.slurm_lab import SlurmLab
from tests.helpers import wait_until

#: Rank 0 logs the score `values` times. In the first attempt, all ranks then sleep for `stay` seconds, so that the test
#: can end them.
SCRIPT = """
import argparse, os, time
import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--values", type=int)
parser.add_argument("--stay", type=int, default=0)
given = parser.parse_args()
run = paceline.Run.get_context()
for step in range(given.values):
    if os.environ["PACELINE_RANK"] == "0":
        run.log("score", given.x + min(step, 10) / 100, step=step)
    time.sleep(0.1)
if os.environ["PACELINE_ATTEMPT"] == "1":
    time.sleep(given.stay)
"""


def submit(there: Place, space: dict[str, Any], **options: Any) -> SweepRun:
    """A sweep of the script over two nodes. Those of its options that a job has are the trials'."""
    there.lab.write(SCRIPT)
    own = {name: options.pop(name) for name in ("max_restarts",) if name in options}
    estimator = pl.Estimator(str(there.lab.source), entry_script="train.py", grace_period_seconds=5, **{**TWO, **own})
    run = there.lab.experiment.submit(pl.Sweep(estimator, space, **{"metric": "score", "seed": 1, **options}))
    assert isinstance(run, SweepRun)
    return run


def until(true: Callable[[], object], run: SweepRun, what: str, timeout_s: float = 60) -> None:
    try:
        wait_until(true, what, timeout_s)
    except AssertionError as error:
        pytest.fail(f"{error}\n{run.trial_rows()}\n{run.folder.driver_log.read_text()}")


def left(engine: Hosts | SlurmLab | RayLab) -> object:
    """What of runs is still on the engine's hosts or in its queue; nothing is false."""
    if isinstance(engine, SlurmLab):
        return engine.run("squeue", "-h")
    if isinstance(engine, RayLab):
        jobs = engine.ask("/api/jobs/")
        return engine.left() or [job for job in jobs if job["status"] in ("PENDING", "RUNNING")]
    return [lines for name in engine.names if (lines := engine.processes(name))]


#: Only `make proof` runs sweeps on all targets. For Ray and Slurm, `make test` runs test_sweep_controllers.py and
#: test_promotion.py, and for Slurm also tests/engines/slurm/test_sweeps.py.
SLURM, *RAY = (pytest.param(way, marks=pytest.mark.proof) for way in ("slurm", "ray", "ray, shared folder"))


@pytest.mark.promise("trials-many-nodes-run-kind")
@pytest.mark.parametrize("way", ["ssh", SLURM, "slurm, login host", RAY[0]])
def test_policy_stops_a_two_node_trial_and_canceling_the_sweep_ends_all_trials(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place(way, request, tmp_path, monkeypatch) as there:
        points = [{"x": 3, "values": 2}, {"x": 2, "values": 6000}, {"x": 4, "values": 6000}, {"x": 0, "values": 2}]
        run = submit(
            there,
            {"x": pl.uniform(0, 9), "values": pl.randint(9999)},
            points=points,
            trials=4,
            concurrent=2,
            stop=pl.Bandit(slack_amount=0.5, delay_evaluation=2),
        )
        # The metrics of a running trial arrive without a request, even if its nodes share no folder with this machine.
        until(lambda: len(run.trial_rows()) > 2 and run.trial_rows()[2]["intervals"] > 1, run, "the last logs")
        until(lambda: run.trial_rows()[1]["status"] == states.CANCELED, run, "the second is stopped")
        stopped = pl.Run(run.experiment, f"{run.id}_1")
        assert stopped.tags["stopped"].startswith("Bandit")
        run.cancel()
        until(lambda: run.record().is_terminal, run, "the sweep has ended")
        rows = run.trial_rows()[:3]
        assert [row["status"] for row in rows] == [states.COMPLETED, states.CANCELED, states.CANCELED]
        assert (rows[0]["score"], rows[0]["intervals"]) == (3.01, 2)
        assert rows[1]["intervals"] >= 2
        assert run.status == states.CANCELED
        best = run.best_child()
        assert best is not None
        assert best.id == f"{run.id}_2"
        assert len(best.record().attempts[0].nodes) == 2
        engine = request.getfixturevalue(WAYS[way][0])
        wait_until(lambda: not left(engine), "nothing is left of the trials")


@pytest.mark.promise("trials-many-nodes-run-kind")
@pytest.mark.parametrize("way", ["ssh", SLURM, RAY[1]])
def test_trial_is_restarted_after_a_node_loss_and_the_sweep_completes(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = request.getfixturevalue(WAYS[way][0])
    with place(way, request, tmp_path, monkeypatch) as there:
        if isinstance(engine, Hosts):
            # Add a third host, which replaces the host that this test kills.
            settings = {**read(there.lab.workspace_dir, "there").settings, "hosts": list(engine.names)}
            add(there.lab.workspace_dir, Configured(name="there", kind="ssh", settings=settings), replace=True)
        space = {"x": pl.choice(1, 2), "values": 3, "stay": pl.choice(600, 0)}
        points = [{"x": 1, "stay": 600}, {"x": 2, "stay": 0}]
        run = submit(there, space, points=points, trials=2, concurrent=1, max_restarts=1)
        until(lambda: run.trial_rows() and run.trial_rows()[0]["intervals"] == 3, run, "the first trial logs")
        first = pl.Run(run.experiment, f"{run.id}_0")
        # Don't kill Ray's head node, because the cluster would end with it.
        head = engine.head if isinstance(engine, RayLab) else None
        lost = next(name for name in reversed(first.record().attempts[0].nodes) if name != head)
        try:
            if isinstance(engine, SlurmLab):
                engine.kill_node(lost)
                wait_until(lambda: "PENDING" in engine.states().values(), "the job is back in the queue", 60)
                engine.boot_node(lost)
            else:
                (engine.hosts if isinstance(engine, RayLab) else engine).kill(lost)
            until(lambda: run.record().is_terminal, run, "the sweep has ended", 80)
        finally:
            if isinstance(engine, RayLab):
                engine.revive(lost)
            elif isinstance(engine, Hosts):
                engine.boot(lost)
        assert [attempt.cause for attempt in first.record().attempts] == ["node_lost", None]
        # Both attempts have logged each step, but the curve has only one value for each step.
        assert [(row["status"], row["score"], row["intervals"]) for row in run.trial_rows()] == [
            (states.COMPLETED, 1.02, 3),
            (states.COMPLETED, 2.02, 3),
        ]
        assert run.status == states.COMPLETED
