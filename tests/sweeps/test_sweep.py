"""Sweeps as a user has them: submitted, judged, stopped, killed and gone on with, on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import SweepError
from paceline.runs import read, states, store
from paceline.sweeps.samplers.samplers import Proposals
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.sweep_run import SweepRun
from paceline.sweeps.warm_start import prior_trials
from paceline.system import locks, processes
from tests.helpers import make_run
from tests.sweeps.helpers import SCRIPT, SWEEP_ID, hold_script, until
from tests.sweeps.made import add_trial, make_sweep


@pytest.mark.promise("sweep-tries-points-runs-their", "sweep-s-outputs-table-history")
def test_sweep_runs_every_point_and_finds_the_best_trial(submit: Any, capsys: Any) -> None:
    space = {"x": pl.choice(1, 2, 3), "--kind": "b"}
    run = submit(space, sampler="grid", arguments=("--x", "9"), concurrent=3, with_png=True)
    run.wait_for_completion(show_output=True)
    assert "trial 2 is Completed: score 3.02" in capsys.readouterr().out
    rows = run.trial_rows()
    assert [(row["trial"], row["status"], row["score"], row["x"]) for row in rows] == [
        *((0, "Completed", 1.02, 1), (1, "Completed", 2.02, 2), (2, "Completed", 3.02, 3)),
    ]
    best = run.best_child()
    assert best.id == f"{run.id}_2"
    assert best.parent == run
    assert best.record().job.arguments == ("--x", "3", "--kind", "b")
    assert run.best_point() == {"x": 3, "--kind": "b"}
    assert [child.id for child in run.get_children()] == [f"{run.id}_{number}" for number in (2, 1, 0)]
    assert (run.kind, run.status) == ("sweep", states.COMPLETED)
    lines = (run.folder.outputs / "trials.csv").read_text().splitlines()
    assert lines[3].startswith(f"2,{run.id}_2,Completed,3.02,3,")
    assert lines[3].endswith(",3,b")
    outputs = {path.name for path in run.folder.outputs.iterdir()}
    pngs = {"history.png", "parallel_coordinates.png"} if importlib.util.find_spec("matplotlib") else set()
    assert outputs == {"trials.csv", "sweep.html"} | pngs
    assert "Importance is left out: it needs values of 10 runs, got 3" in run.folder.driver_log.read_text()
    # The workspace returns the sweep by its id, and the ended sweep gets more trials.
    again = run.experiment.workspace.get_run(run.id)
    assert isinstance(again, SweepRun)
    # A list of runs has the sweep as a SweepRun too, which a notebook shows with its trials.
    (listed,) = run.experiment.get_runs()
    assert isinstance(listed, SweepRun)
    again.more(1)
    until(lambda: run.record().is_terminal and run.spec.trials == 4)
    assert len(run.trial_rows()) == 3  # the grid has no more points


@pytest.mark.promise("stopped-trial-canceled-reason-keeps")
def test_trial_far_behind_the_best_is_canceled_and_tagged_with_the_reason(submit: Any) -> None:
    run = submit(
        {"x": pl.uniform(0, 1)},
        points=[{"x": 0.9}, {"x": 0.1}],
        trials=2,
        concurrent=2,
        stop=pl.Bandit(slack_factor=0.5, delay_evaluation=2),
        arguments=("--values", "6000", "--pause", "0.1"),
    )
    until(lambda: len(run.trial_rows()) == 2 and run.trial_rows()[1]["status"] == states.CANCELED)
    stopped = pl.Run(run.experiment, f"{run.id}_1")
    assert stopped.tags["stopped"].startswith("Bandit: its best of 0.1")
    assert stopped.record().canceled_by == f"sweep {run.id}"
    assert run.trial_rows()[1]["intervals"] >= 2
    # Canceling the sweep cancels its trials.
    run.cancel()
    until(lambda: run.record().is_terminal)
    assert [row["status"] for row in run.trial_rows()] == [states.CANCELED] * 2
    assert run.status == states.CANCELED


@pytest.mark.promise("controller-killed-goes-trial-lost")
def test_killed_controller_resumes_its_sweep(submit: Any, tmp_path: Path) -> None:
    go = hold_script(tmp_path)
    run = submit({"x": pl.uniform(0, 1)}, trials=5, concurrent=2, arguments=("--pause", "0.1"))
    killed: set[int] = set()

    def is_over() -> bool:
        record = run.record()
        pid = record.owner["pid"]
        may_be = len(killed) < 4 and pid not in {os.getpid(), *killed} and not record.is_terminal
        if may_be and processes.send(pid, signal.SIGKILL):
            killed.add(pid)
        if len(killed) == 2:
            go.touch()
        return bool(record.is_terminal)

    until(is_over)
    assert len(killed) >= 2
    rows = run.trial_rows()
    assert [(row["trial"], row["status"], row["intervals"]) for row in rows] == [
        (number, states.COMPLETED, 3) for number in range(5)
    ]
    # The killed controller has not changed the points: they are those of a new sampler with the same seed.
    space, spec = run.spec.space, run.spec
    from paceline.sweeps.samplers.sampler import RandomSampler

    sampler = RandomSampler(space, spec.seed)
    assert [row["x"] for row in rows] == [
        space.values(proposal.chosen)["x"] for n in range(5) if (proposal := sampler.propose(n, ()))
    ]
    assert all(len(pl.Run(run.experiment, row["run_id"]).record().attempts) == 1 for row in rows)
    assert not list(run.folder.path.parent.glob(".new-*"))


@pytest.mark.promise("ends-sweep-s-controller-ends")
def test_failing_controller_ends_its_trials(submit: Any) -> None:
    """A trial without a controller would never be judged or ended.

    Every later trial ends at once: with drawn points, two that pause could take both places before the snapshot was gone.
    """
    quick = [{"x": number / 100, "pause": 0} for number in range(60)]
    run = submit(
        {"x": pl.uniform(0, 1), "pause": pl.choice(0, 600)},
        points=[{"x": 0.9, "pause": 600}, *quick],
        trials=61,
        concurrent=2,
    )
    until(lambda: [row["intervals"] > 0 for row in run.trial_rows()][:2] == [True, True])
    shutil.rmtree(run.folder.snapshot.resolve())
    with pytest.raises(pl.errors.RunFailedError, match=r"The sweep can not go on: snapshot .* is no longer in"):
        run.wait_for_completion()
    assert run.record().failure.cause == "trials"
    assert run.trial_rows()[0]["status"] == states.CANCELED
    assert "can not go on" in pl.Run(run.experiment, f"{run.id}_0").tags["stopped"]


@pytest.mark.promise("ends-sweep-s-controller-ends")
def test_sweep_whose_record_no_controller_can_read_ends_its_trials(submit: Any) -> None:
    run = submit({"x": pl.uniform(0, 1)}, concurrent=1, arguments=("--pause", "600"))
    until(lambda: run.trial_rows() and run.trial_rows()[0]["intervals"])
    # Store a record that no controller can read.
    record = json.loads(run.folder.state.read_text())
    record["sweep"]["metric"] = ""
    os.kill(record["owner"]["pid"], signal.SIGKILL)
    until(lambda: not locks.is_held(run.folder.lock))
    run.folder.state.write_text(json.dumps(record))
    until(lambda: run.record().is_terminal)
    assert "metric=''" in run.record().failure.message
    trial = pl.Run(run.experiment, f"{run.id}_0")
    until(lambda: trial.status == states.CANCELED)


def test_sweep_without_a_startable_controller_ends_its_trials(tmp_path: Path) -> None:
    """For example with a broken installation: a reader of the sweep gives up."""
    spec = SweepSpec(space=Space({"x": 1}), metric="loss")
    owner = {**store.owner(), "starts": 3}
    folder, fd = make_run(tmp_path / "runs", SWEEP_ID, states.RUNNING, kind="sweep", sweep=spec.to_json(), owner=owner)
    running = add_trial(folder, 0, {"x": 1}, status=states.RUNNING)
    ended = add_trial(folder, 1, {"x": 1})
    os.close(fd)
    record = read.record(folder)
    assert record.status == states.FAILED
    assert "ended 3 times before it could begin" in record.failure.message
    assert read.record(running).status == states.CANCEL_REQUESTED
    assert not ended.cancel_request.exists()


@pytest.mark.promise("several-metrics-pareto-front-python")
def test_sweep_of_several_metrics_has_a_pareto_front(submit: Any) -> None:
    run = submit(
        {"x": pl.choice(1, 2), "cost": pl.choice(5, 9)},
        metric=["score", "cost"],
        goal=["maximize", "minimize"],
        sampler="grid",
        concurrent=3,
    )
    run.wait_for_completion()
    assert [(row["x"], row["cost"], row["front"]) for row in run.trial_rows()] == [
        *((1, 5, False), (1, 9, False), (2, 5, True), (2, 9, False)),
    ]
    assert [child.id for child in run.best_children()] == [f"{run.id}_2"]
    with pytest.raises(SweepError, match=r"has 2 metrics, and no trial is the best in all. Take best_children\(\)"):
        run.best_child()
    assert (run.folder.outputs / "trials.csv").read_text().startswith("trial,run_id,status,score,cost,front,")
    assert "trial 2 is Completed: score 2.02, cost 5, on the Pareto front of 1" in run.folder.driver_log.read_text()


@pytest.mark.promise("results-former-sweeps-known-start")
def test_sweep_warm_starts_from_another_sweep(submit: Any, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra tune is not installed")
    space = {"x": pl.uniform(0, 1)}
    # Write the results of 12 trials, from which the sampler can learn. That is faster than running 12 trials, and
    # leaves the same files.
    first = make_sweep(tmp_path / ".paceline" / "runs", SweepSpec(space=Space(space), metric="score"))
    for number in range(12):
        x = number / 12
        add_trial(first, number, {"x": x}, (x, x + 0.01), chosen={"x": x}, metric="score")
    second = submit(space, trials=2, concurrent=1, sampler="tpe", warm_start=[first.run_id])
    second.wait_for_completion()
    assert second.spec.warm_start == (first.run_id,)
    assert f"12 results of former sweeps are known: {first.run_id}" in second.folder.driver_log.read_text()
    # The proposals equal those of a sampler that got the earlier results.
    proposals = Proposals(second.spec, second.folder.path, prior_trials(second.folder, second.spec))
    proposal = proposals.propose(0, [])
    assert proposal is not None
    assert second.trial_rows()[0]["x"] == space["x"].value(proposal.chosen["x"])


@pytest.mark.promise("two-sweeps-one-workspace-do")
def test_concurrent_sweeps_in_one_workspace_run_only_their_own_trials(submit: Any) -> None:
    one = submit({"x": pl.choice(1, 2)}, sampler="grid", concurrent=2)
    other = submit({"x": pl.choice(3)}, sampler="grid", concurrent=2)
    for run, values in ((other, [3]), (one, [1, 2])):
        run.wait_for_completion()
        assert [row["x"] for row in run.trial_rows()] == values
        assert {child.parent.id for child in run.get_children()} == {run.id}


@pytest.mark.promise("metric-never-comes-common-cause")
def test_failing_trials_end_a_sweep_with_their_common_cause(submit: Any) -> None:
    run = submit({"x": pl.uniform(0, 1)}, trials=50, concurrent=2, max_failures=2, arguments=("--fail",))
    with pytest.raises(pl.errors.RunFailedError, match="failed with the same error: ValueError: no luck with this one"):
        run.wait_for_completion()
    assert 2 <= len(run.trial_rows()) <= 4


@pytest.mark.promise("metric-never-comes-common-cause")
def test_missing_primary_metric_is_reported_with_the_logged_names(submit: Any) -> None:
    run = submit({"x": pl.uniform(0, 1)}, metric="accuracy", trials=50, concurrent=1)
    with pytest.raises(pl.errors.RunFailedError, match=r"primary metric 'accuracy'. It logged score."):
        run.wait_for_completion()
    assert len(run.trial_rows()) <= 4
    assert run.best_child() is None
    # There are no values, so no figure is drawn.
    assert [path.name for path in run.folder.outputs.iterdir()] == ["trials.csv"]


@pytest.mark.promise("wrong-sweep-refused-before-anything")
def test_invalid_sweeps_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    estimator = pl.Estimator(tmp_path, entry_script="train.py")
    space = {"x": pl.uniform(0, 1)}
    wrong: dict[str, Any] = {
        "is made of an Estimator": lambda: pl.Sweep("train.py", space, metric="score"),
        "metric='' is not a name": lambda: pl.Sweep(estimator, space, metric=""),
        "goal='up'": lambda: pl.Sweep(estimator, space, metric="score", goal="up"),  # type: ignore[arg-type]
        "array_size=1001 is not an integer from 1 to 1000": lambda: pl.Sweep(
            estimator, space, metric="score", array_size=1001
        ),
        "controller='k8s': write 'slurm' or 'ray'": lambda: pl.Sweep(
            estimator, space, metric="score", controller="k8s"
        ),
        "trials=0": lambda: pl.Sweep(estimator, space, metric="score", trials=0),
        "concurrent=True": lambda: pl.Sweep(estimator, space, metric="score", concurrent=True),
        "has no end of values": lambda: pl.Sweep(estimator, space, metric="score", sampler="grid"),
        "sampler='bayes'": lambda: pl.Sweep(estimator, space, metric="score", sampler="bayes"),
        "stop='asha' is not a policy": lambda: pl.Sweep(estimator, space, metric="score", stop="asha"),  # type: ignore[arg-type]
        "policies judge trials by one": lambda: pl.Sweep(
            estimator, space, metric=["a", "b"], goal=["maximize", "minimize"], stop=pl.ASHA()
        ),
        "give one goal for each metric": lambda: pl.Sweep(estimator, space, metric=["a", "b"], goal="maximize"),
        "the metric 'a' is there twice": lambda: pl.Sweep(
            estimator, space, metric=["a", "a"], goal=["maximize", "minimize"]
        ),
        "cmaes knows one metric": lambda: pl.Sweep(
            estimator, space, metric=["a", "b"], goal=["maximize", "minimize"], sampler="cmaes"
        ),
        "x: 2 is not in uniform": lambda: pl.Sweep(estimator, space, metric="score", points=[{"x": 2}]),
        "'--y' is not a hyperparameter. Give one of the space's: x": lambda: pl.Sweep(
            estimator, space, metric="score", switches=["y"]
        ),
        "'--x' has values beside true and false": lambda: pl.Sweep(estimator, space, metric="score", switches="x"),
        "leave them out; they are arguments": lambda: pl.Sweep(
            estimator, {"x": True}, metric="score", switches=["x"], pass_as="environment"
        ),
        "3 is not a name of a hyperparameter": lambda: pl.Sweep(estimator, space, metric="score", switches=[3]),  # type: ignore[list-item]
        "switches=3 is not a list": lambda: pl.Sweep(estimator, space, metric="score", switches=3),  # type: ignore[arg-type]
        "points: 0.5 is not a point": lambda: pl.Sweep(estimator, space, metric="score", points=[0.5]),  # type: ignore[list-item]
        "points=0.5 is not a list": lambda: pl.Sweep(estimator, space, metric="score", points=0.5),  # type: ignore[arg-type]
        "stop=ASHA is a class. Make a policy": lambda: pl.Sweep(estimator, space, metric="score", stop=pl.ASHA),  # type: ignore[arg-type]
        "repeats='no'": lambda: pl.Sweep(estimator, space, metric="score", repeats="no"),  # type: ignore[arg-type]
        "'--x/' is neither --name nor": lambda: pl.Sweep(estimator, {"x": True}, metric="score", switches=["--x/"]),
        "max_duration_seconds": lambda: pl.Sweep(estimator, space, metric="score", max_duration_seconds="soon"),
    }
    for message, make in wrong.items():
        with pytest.raises(SweepError) as caught:
            make()
        assert message in str(caught.value), message
    # A single point or switch is the same as a list with one member.
    alone = pl.Sweep(estimator, {"x": True}, metric="score", points={"x": True}, switches="x").spec()  # type: ignore[arg-type]
    assert (alone.points, alone.switches) == (({"x": True},), ("--x",))
    experiment = pl.Experiment(pl.Workspace(tmp_path / ".paceline"), "tuned")
    sweep = pl.Sweep(pl.Estimator(tmp_path, entry_script="train.py", compute_target="lab"), space, metric="score")
    with pytest.raises(pl.errors.TargetError, match="lab"):
        experiment.submit(sweep)
    with pytest.raises(SweepError, match=r"array_size=8: compute target 'local' is of kind local.*Leave it out"):
        experiment.submit(pl.Sweep(estimator, space, metric="score", array_size=8))
    with pytest.raises(SweepError, match=r"controller='slurm': compute target 'local' is of kind local"):
        experiment.submit(pl.Sweep(estimator, space, metric="score", controller="slurm"))
    assert not list(experiment.runs_dir.iterdir())
