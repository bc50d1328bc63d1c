"""Sweeps whose controller is a job of the trials' own engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import PacelineError
from paceline.runs import states
from paceline.sweeps.sweep_run import SweepRun
from paceline.system import processes
from tests.engines.places import WAYS, Place, place
from tests.engines.ray_lab import RayLab
from tests.engines.slurm_lab import SlurmLab
from tests.helpers import wait_until

SCRIPT = """
import argparse, os, time
import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--stay", type=float, default=0)
given = parser.parse_args()
paceline.Run.get_context().log("score", given.x)
time.sleep(abs(given.stay))
while given.stay < 0 and not os.path.exists(os.path.join(os.environ["PACELINE_WORKSPACE"], "gate")):
    time.sleep(0.05)
"""


def submit(there: Place, space: dict[str, Any], **options: Any) -> SweepRun:
    there.lab.write(SCRIPT)
    estimator = pl.Estimator(
        str(there.lab.source), entry_script="train.py", compute_target="there", grace_period_seconds=5
    )
    run = there.lab.experiment.submit(pl.Sweep(estimator, space, **{"metric": "score", "seed": 1, **options}))
    assert isinstance(run, SweepRun)
    return run


def until(true: Any, run: SweepRun, what: str) -> None:
    try:
        wait_until(true, what, 60)
    except AssertionError as error:
        pytest.fail(f"{error}\n{run.record()}\n{run.trial_rows()}\n{run.folder.driver_log.read_text()}")


def controllers(engine: SlurmLab | RayLab, run: SweepRun) -> dict[int, str]:
    """pid -> host of the processes that look after the sweep."""
    found = {}
    for name in engine.hosts.names:
        for pid, line in engine.hosts.processes(name).items():
            if "-m paceline.sweeps" in line and run.id in line:
                found[pid] = name
    # Ignore forked children. Until a child calls exec, it has the command line of its parent.
    return {pid: name for pid, name in found.items() if int((processes.stat_of(pid) or ["", "0"])[1]) not in found}


@pytest.mark.promise("sweep-s-controller-may-job")
@pytest.mark.parametrize("way", ["slurm", "ray, shared folder"])
def test_killed_sweep_controller_is_replaced_if_it_ran_as_a_slurm_or_ray_job(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = request.getfixturevalue(WAYS[way][0])
    with place(way, request, tmp_path, monkeypatch) as there:
        # On Ray, the first sweep has all nine trials, because each job starts several processes. On Slurm, the sweep
        # has two trials, and `sweep more` continues it after its end.
        goes_on = isinstance(engine, RayLab)
        space, trials = {"x": pl.choice(*range(9)), "stay": -0.5}, 9 if goes_on else 2
        run = submit(there, space, sampler="grid", trials=trials, concurrent=1, controller=way.partition(",")[0])
        until(lambda: run.trial_rows() and run.trial_rows()[0]["score"] == 0, run, "the first trial logs")
        ((pid, host),) = controllers(engine, run).items()
        assert run.record().owner["host"] == host
        os.kill(pid, signal.SIGKILL)
        (there.lab.workspace_dir / "gate").touch()
        completed = [(states.COMPLETED, 0), (states.COMPLETED, 1)]
        until(
            lambda: [(row["status"], row["score"]) for row in run.trial_rows()[:2]] == completed, run, "two have ended"
        )
        children = [pl.Run(run.experiment, row["run_id"]) for row in run.trial_rows()[:2]]
        assert [len(child.record().attempts) for child in children] == [1, 1]
        if not goes_on:
            until(lambda: run.record().is_terminal, run, "the sweep has ended")
            assert (run.status, len(run.trial_rows())) == (states.COMPLETED, 2)
            wait_until(lambda: not controllers(engine, run), "no controller is left")
            run.more(6)
        until(lambda: len(run.trial_rows()) > 2, run, "one more trial")
        assert controllers(engine, run)
        run.cancel()
        until(lambda: run.record().is_terminal, run, "the sweep is canceled")
        assert run.status == states.CANCELED
        wait_until(lambda: not controllers(engine, run), "no controller is left")


@pytest.mark.promise("sweep-s-controller-may-job")
@pytest.mark.parametrize("way", ["slurm, login host", "ray"])
def test_sweep_controller_job_is_refused_if_its_slurm_or_ray_target_cannot_see_the_workspace(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place(way, request, tmp_path, monkeypatch) as there:
        with pytest.raises(PacelineError, match="this workspace, where a sweep's controller has all that it knows"):
            submit(there, {"x": pl.choice(1, 2)}, controller=way.partition(",")[0])
        assert not list(there.lab.experiment.runs_dir.iterdir())


# The test needs only Slurm. Because "slurm" is a parameter, pytest groups this test with other tests of Slurm, which
# share one cluster.
@pytest.mark.promise("sweep-s-controller-may-job")
@pytest.mark.parametrize("way", ["slurm"])
def test_scancel_of_the_sweep_controllers_slurm_job_cancels_the_sweep_and_its_trials(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = request.getfixturevalue("slurm_cluster")
    with place(way, request, tmp_path, monkeypatch) as there:
        run = submit(there, {"x": pl.uniform(0, 1), "stay": 600}, trials=2, concurrent=2, controller="slurm")
        until(lambda: [row["status"] for row in run.trial_rows()] == [states.RUNNING] * 2, run, "both trials run")
        cluster.run("scancel", f"--name=paceline-{run.id}")
        until(lambda: run.record().is_terminal, run, "the sweep has ended")
        assert run.status == states.CANCELED
        assert [row["status"] for row in run.trial_rows()] == [states.CANCELED] * 2
        cluster.settle()
