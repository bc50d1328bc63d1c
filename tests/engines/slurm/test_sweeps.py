"""Sweeps whose trials are tasks of job arrays, on a real Slurm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.runs import remote_status, states
from paceline.runs.remote_status import engine
from paceline.sweeps.sweep_run import SweepRun
from paceline.system import processes
from paceline.targets import polling
from paceline.targets.configured import Configured, add
from tests.engines import places
from tests.engines.conformance import FRESH_S, GRACE_S
from tests.engines.lab import Lab, wait_for_end
from tests.engines.slurm_lab import SlurmLab
from tests.helpers import wait_until, write_program

#: This script logs its score and then runs for the given time.
SCRIPT = """
import argparse, time
import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--stay", type=float, default=0)
given = parser.parse_args()
paceline.Run.get_context().log("score", given.x)
time.sleep(given.stay)
"""


@pytest.fixture
def slurm(slurm_cluster: SlurmLab, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """The cluster as compute target `cluster`. What sbatch is called with is written down. In the end no job may be left."""
    for name, value in slurm_cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
    monkeypatch.setattr(polling, "FRESH_S", FRESH_S)
    sbatch = f'#!/bin/sh\necho "$@" >>{lab.folder}/sbatch.log\nexec /usr/bin/sbatch "$@"\n'
    write_program(lab.folder / "bin" / "sbatch", sbatch)
    monkeypatch.setenv("PATH", f"{lab.folder}/bin{os.pathsep}{os.environ['PATH']}")
    add(lab.workspace_dir, Configured(name="cluster", kind="slurm", settings={"time": "10"}))
    yield slurm_cluster
    try:
        wait_until(lambda: not slurm_cluster.run("squeue", "-h"), "no job is left")
    finally:
        slurm_cluster.settle()


def submit(lab: Lab, space: dict[str, Any], *, target: str = "cluster", **options: Any) -> SweepRun:
    lab.write(SCRIPT)
    estimator = pl.Estimator(str(lab.source), entry_script="train.py", compute_target=target, grace_period_seconds=5)
    run = lab.experiment.submit(pl.Sweep(estimator, space, **{"metric": "score", "seed": 1, **options}))
    assert isinstance(run, SweepRun)
    return run


def arrays(run: SweepRun) -> dict[str, list[str]]:
    """Number of a job array -> its tasks, each of a trial in order."""
    found: dict[str, list[str]] = {}
    for row in run.trial_rows():
        array, _, task = str(engine(pl.Run(run.experiment, row["run_id"]).folder)["job_id"]).partition("_")
        found.setdefault(array, []).append(task)
    return found


@pytest.mark.promise("slurm-many-trials-one-job")
def test_seven_trials_run_as_tasks_of_two_slurm_job_arrays_if_array_size_is_four(slurm: SlurmLab, lab: Lab) -> None:
    run = submit(lab, {"x": pl.choice(*range(7))}, sampler="grid", trials=7, concurrent=2, array_size=4)
    assert wait_for_end(run) == states.COMPLETED
    assert [(row["status"], row["score"]) for row in run.trial_rows()] == [(states.COMPLETED, x) for x in range(7)]
    assert list(arrays(run).values()) == [["0", "1", "2", "3"], ["4", "5", "6"]]
    calls = (lab.folder / "sbatch.log").read_text().splitlines()
    assert calls.count("--parsable") == 2
    best = run.best_child()
    assert best is not None
    # Each trial is an ordinary run with its own log.
    assert best.id == f"{run.id}_6"
    assert best.folder.driver_log.exists()
    assert best.record().job.arguments == ("--x", "6")  # type: ignore[union-attr]


@pytest.mark.proof
def test_job_arrays_are_submitted_through_a_login_host(
    slurm_cluster: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with places.slurm(slurm_cluster, tmp_path, monkeypatch, login=True) as there:
        run = submit(
            there.lab, {"x": pl.choice(1, 2)}, target="there", sampler="grid", trials=2, concurrent=2, array_size=2
        )
        assert wait_for_end(run) == states.COMPLETED
        assert [(row["status"], row["score"]) for row in run.trial_rows()] == [(states.COMPLETED, x) for x in (1, 2)]
        assert list(arrays(run).values()) == [["0", "1"]]
    slurm_cluster.settle()


@pytest.mark.promise("slurm-many-trials-one-job")
def test_ending_one_trial_ends_only_its_array_task(slurm: SlurmLab, lab: Lab) -> None:
    points = [{"x": 0, "stay": 600}, {"x": 1, "stay": 600}, {"x": 2, "stay": 0}, {"x": 3, "stay": 600}]
    run = submit(
        lab,
        {"x": pl.uniform(0, 9), "stay": pl.choice(600, 0)},
        points=points,
        trials=4,
        concurrent=2,
        array_size=4,
    )
    try:
        wait_until(lambda: [row["score"] for row in run.trial_rows()] == [0, 1, None, None], "two tasks run", 60)
        children = [pl.Run(run.experiment, f"{run.id}_{number}") for number in range(4)]
        assert [child.status for child in children[2:]] == [states.QUEUED] * 2
        # Cancel trial 3, which waits. The other waiting trial stays in the queue.
        children[3].cancel()
        assert wait_for_end(children[3]) == states.CANCELED
        expected = [states.RUNNING, states.RUNNING, states.QUEUED]
        wait_until(lambda: [child.status for child in children[:3]] == expected, "the others stay", 60)
        # Cancel trial 1, which runs. The waiting trial 2 takes its place.
        children[1].cancel()
        assert [wait_for_end(child) for child in children[1:3]] == [states.CANCELED, states.COMPLETED]
        wait_until(lambda: children[0].status == states.RUNNING, "the first trial stays", 60)
    finally:
        run.cancel()
    assert wait_for_end(run) == states.CANCELED
    assert children[0].status == states.CANCELED


@pytest.mark.promise("slurm-many-trials-one-job")
def test_controller_killed_during_array_submission_loses_no_trial(slurm: SlurmLab, lab: Lab) -> None:
    # The first sbatch command of the array hangs, and is killed with the controller. Then the trials have run folders,
    # but no process handles the trials.
    gate = lab.folder / "gate"
    hangs = f'[ "$1" = --parsable ] && [ ! -e {gate} ] && touch {gate} && exec sleep 600\n'
    sbatch = lab.folder / "bin" / "sbatch"
    write_program(sbatch, sbatch.read_text().replace("exec", f"{hangs}exec", 1))
    run = submit(lab, {"x": pl.choice(0, 1, 2)}, sampler="grid", trials=3, concurrent=3, array_size=3)
    wait_until(gate.exists, "sbatch is called", 60)
    controller = run.record().owner["pid"]
    for pid in (controller, *children_of(controller)):
        processes.send(pid, signal.SIGKILL)
    for child in Path(lab.workspace_dir / "runs").glob(f"{run.id}_*/engine.json"):
        # Make the recorded submission so old that a response of Slurm can no longer arrive.
        child.write_text(child.read_text().replace('"submitting": 1', '"submitting": 0.1'))
    assert wait_for_end(run) == states.COMPLETED
    assert [(row["status"], row["score"]) for row in run.trial_rows()] == [(states.COMPLETED, x) for x in range(3)]


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
