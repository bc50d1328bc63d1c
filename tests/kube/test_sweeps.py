"""Trials as indexes of one Job, on a real cluster."""

from __future__ import annotations

import time
from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import engine
from paceline.sweeps.sweep_run import SweepRun
from paceline.targets import configured
from paceline.targets.kubernetes.settings import read_settings
from paceline.targets.polling import answers_dir, keep
from tests.helpers import wait_until
from tests.kube.lab import KubeLab, wait_for_end

pytest.importorskip("paceline.targets.kubernetes", reason="needs the compute target kubernetes")

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

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


def submit(lab: KubeLab, space: dict[str, Any], **options: Any) -> SweepRun:
    lab.write(SCRIPT)
    estimator = pl.Estimator(str(lab.source), entry_script="train.py", compute_target="k8s", grace_period_seconds=5)
    run = lab.experiment.submit(pl.Sweep(estimator, space, **{"metric": "score", "seed": 1, **options}))
    assert isinstance(run, SweepRun)
    return run


def children(lab: KubeLab, run: SweepRun, count: int) -> list[pl.Run]:
    """Return the runs of the trials, whose remains `lab` looks for."""
    folders = [RunFolder(run.folder.path.with_name(f"{run.id}_{number}")) for number in range(count)]
    wait_until(lambda: all(engine(folder).get("submitted") for folder in folders), "the trials are submitted", 120)
    found = [pl.Run(run.experiment, folder.run_id) for folder in folders]
    lab.runs += found
    return found


def jobs(runs: list[pl.Run]) -> list[list[int]]:
    """Return the indexes of each Job's runs."""
    found: dict[str, list[int]] = {}
    for run in runs:
        noted = engine(run.folder)
        found.setdefault(noted["job_id"], []).append(noted["index"])
    return list(found.values())


def test_seven_trials_run_as_indexes_of_two_kubernetes_jobs_if_array_size_is_four(lab: KubeLab) -> None:
    run = submit(lab, {"x": pl.choice(*range(7))}, sampler="grid", trials=7, concurrent=2, array_size=4)

    assert wait_for_end(run) == states.COMPLETED

    assert [(row["status"], row["score"]) for row in run.trial_rows()] == [(states.COMPLETED, x) for x in range(7)]
    assert jobs(children(lab, run, 7)) == [[0, 1, 2, 3], [0, 1, 2]]
    best = run.best_child()
    assert best is not None
    assert best.id == f"{run.id}_6"
    assert best.folder.driver_log.exists()
    assert best.record().job.arguments == ("--x", "6")  # type: ignore[union-attr]


@pytest.mark.parametrize("forwards", [True, False], ids=["port-forward", "log"])
def test_ending_one_trial_ends_only_its_index_of_the_kubernetes_job(lab: KubeLab, forwards: bool) -> None:
    context = read_settings("k8s", configured.read(lab.workspace_dir, "k8s").settings)[1].context
    keep(
        answers_dir(lab.workspace_dir) / "k8s.rights.json",
        {"told": time.time(), "context": context, "forwards": forwards},
    )
    points = [{"x": 0, "stay": 600}, {"x": 1, "stay": 600}, {"x": 2, "stay": 0}, {"x": 3, "stay": 600}]
    space = {"x": pl.uniform(0, 9), "stay": pl.choice(600, 0)}
    run = submit(lab, space, points=points, trials=4, concurrent=2, array_size=4)
    found = children(lab, run, 4)
    try:
        wait_until(lambda: [row["score"] for row in run.trial_rows()] == [0, 1, None, None], "two trials run", 120)
        assert [child.status for child in found[2:]] == [states.QUEUED] * 2
        assert found[2].record().waiting_for == "its Job runs at most 2 pods at the same time"
        # Cancel trial 3, which waits. Trial 2 stays in the queue.
        found[3].cancel()
        assert wait_for_end(found[3]) == states.CANCELED
        assert [child.status for child in found[:3]] == [states.RUNNING, states.RUNNING, states.QUEUED]
        # Cancel trial 1, which runs. The waiting trial 2 takes its place.
        found[1].cancel()
        assert [wait_for_end(child) for child in found[1:3]] == [states.CANCELED, states.COMPLETED]
        assert found[0].status == states.RUNNING
    finally:
        run.cancel()
    assert wait_for_end(run) == states.CANCELED
    assert found[0].status == states.CANCELED


def test_failed_and_evicted_trials_do_not_disturb_the_others_of_their_job(lab: KubeLab) -> None:
    lab.write("import sys, time; time.sleep(float(sys.argv[2])); sys.exit(int(float(sys.argv[2])) % 2)")
    estimator = pl.Estimator(str(lab.source), entry_script="train.py", compute_target="k8s", max_restarts=1)
    space = {"stay": pl.choice(1, 2, 40)}
    sweep = pl.Sweep(estimator, space, sampler="grid", metric="score", trials=3, concurrent=3, array_size=3)
    run = lab.experiment.submit(sweep)
    assert isinstance(run, SweepRun)
    found = children(lab, run, 3)
    wait_until(lambda: found[2].status == states.RUNNING, "the last trial runs", 120)
    label = f"--selector=batch.kubernetes.io/job-name={engine(found[2].folder)['job_id']}"
    name = '{range .items[?(@.metadata.annotations.batch\\.kubernetes\\.io/job-completion-index=="2")]}'
    pod = lab.access.kubectl("get", "pods", label, f"--output=jsonpath={name}{{.metadata.name}}{{end}}").strip()

    lab.access.kubectl("delete", "pod", pod, "--grace-period=1")

    assert [wait_for_end(child) for child in found] == [states.FAILED, states.COMPLETED, states.COMPLETED]
    wait_for_end(run)
