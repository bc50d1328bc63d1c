"""Trials handed over to an engine that does not take them, by a clock of the test's own."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline as pl
from paceline.errors import EngineError
from paceline.job.job import Job
from paceline.runs import states, store
from paceline.submit import NewRun
from paceline.sweeps import dispatch
from paceline.sweeps.dispatch import Dispatcher
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial_runs import PROMOTED, RUNG
from paceline.system import processes
from tests.helpers import make_run
from tests.sweeps.helpers import hold_script, sweep_on_disk, until

#: This script's checkpoint has the run id and the hyperparameter x of each epoch. The script writes the checkpoint
#: before it logs, because Paceline may end the run after a logged value.
SCRIPT = """
import argparse, json, os, time
import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--pause", type=float, default=0.2)
parser.add_argument("--forgets", action="store_true")
parser.add_argument("--stays-at", type=int, nargs="*", default=[])
given = parser.parse_args()
run = paceline.Run.get_context()
path = os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], "state.json")
seen = json.load(open(path)) if os.path.exists(path) else []
for epoch in range(len(seen), given.epochs):
    seen.append([run.id, given.x])
    if not given.forgets:
        with open(path + ".new", "w") as file:
            json.dump(seen, file)
        os.replace(path + ".new", path)
    os.makedirs("outputs", exist_ok=True)
    open("outputs/epoch", "w").write(str(epoch))
    run.log("score", given.x + epoch / 100, step=epoch)
    # Where it is sure to be told to end: a slow machine then changes nothing of what comes of it.
    time.sleep(600 if epoch + 1 in given.stays_at else given.pause)
"""


class Engine:
    """Takes trials while it is up. asked: the times of requests, and their trials."""

    def __init__(self, tmp_path: Path) -> None:
        self.is_up = False
        self.now = 0.0
        self.prepared = 0
        self.asked: list[tuple[float, str]] = []
        self.points: list[dict[str, Any]] = []
        self._runs_dir = tmp_path / ".paceline" / "runs"

    def prepare(self, *_: Any) -> Engine:
        self.prepared += 1
        return self

    def check_again(self, job: Job) -> None:
        assert self.prepared

    def start(self, run: NewRun) -> Any:
        assert run.trial is not None
        self.asked.append((self.now, run.run_id[-1]))
        self.points.append(dict(run.trial["chosen"]))
        folder, fd = make_run(self._runs_dir, run.run_id, trial=run.trial)
        if not self.is_up:
            # A failed `Submission.start` leaves a trial without a process.
            store.change(folder, store.stored(folder), states.FAILED)

            os.close(fd)
            raise EngineError("slurmctld is away.")
        os.close(fd)
        return folder

    def pass_time(self, handing: Dispatcher, first: int, last: int) -> None:
        for self.now in range(first, last):
            handing.fill()


@pytest.mark.promise("ends-sweep-s-controller-ends")
def test_trial_submissions_refused_by_the_engine_back_off_and_finally_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    monkeypatch.setattr(dispatch, "prepare", engine.prepare)
    with sweep_on_disk(tmp_path, space={"x": pl.choice(*range(100))}, concurrent=2, sampler="random") as folder:
        sweep = SweepState(folder)
        handing = Dispatcher(sweep, clock=lambda: engine.now)
        with pytest.raises(
            EngineError, match=r"'local' has taken no trial for 6\d minutes: slurmctld is away"
        ) as caught:
            engine.pass_time(handing, 0, 10_000)
        assert f"paceline sweep more {folder.run_id}" in str(caught.value)
        times = [time for time, _ in engine.asked]
        assert times[:8] == [0, 5, 15, 35, 75, 155, 315, 615]
        assert {number for _, number in engine.asked} == {"0"}
        # All attempts submit the same point, although a sampler would propose another point at a second call.
        assert all(point == engine.points[0] for point in engine.points)
        assert "does not take trial 0: slurmctld" in str(store.stored(folder).waiting_for)
        assert not sweep.next_folder(0).path.exists()


def test_accepted_trial_submission_resets_the_backoff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    monkeypatch.setattr(dispatch, "prepare", engine.prepare)
    with sweep_on_disk(tmp_path, space={"x": pl.choice(*range(100))}, concurrent=2) as folder:
        sweep = SweepState(folder)
        handing = Dispatcher(sweep, clock=lambda: engine.now)
        engine.pass_time(handing, 0, 3000)
        engine.is_up = True
        refused = engine.prepared
        engine.pass_time(handing, 3000, 3400)
        assert len(sweep.trials) == 2
        assert engine.prepared == refused + 1, "one preparation serves all trials that the engine accepts"
        assert store.stored(folder).waiting_for is None
        # While a trial is running, the engine may be full, so the controller waits without a limit.
        engine.is_up = False
        sweep.trials[1] = dataclasses.replace(sweep.trials[1], status=states.COMPLETED)
        del sweep.live[1]
        engine.pass_time(handing, 3400, 20_000)
        assert len(sweep.trials) == 2
        del sweep.live[0]
        with pytest.raises(EngineError, match="has taken no trial"):
            engine.pass_time(handing, 20_000, 30_000)


def test_killed_submission_of_trials_is_repeated_with_the_same_parameter_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[str] = []
    monkeypatch.setattr(dispatch, "submit_again", lambda folder, values: again.append(folder.run_id))
    with sweep_on_disk(tmp_path, space={"x": pl.choice(*range(100))}, seed=1, trials=2) as folder:
        for number in range(2):
            told = {"number": number, "chosen": {"x": 70 + number}, "values": {"x": 70 + number}}
            os.close(make_run(folder.path.parent, f"{folder.run_id}_{number}", trial=told)[1])
        sweep = SweepState(folder)
        sweep.take_up()
        assert [(trial.status, trial.chosen["x"]) for trial in sweep.trials] == [
            (states.NOT_STARTED, x) for x in (70, 71)
        ]
        # The records say that both trials have failed, but they have never run, so they start again.
        assert sweep.look() == []
        Dispatcher(sweep).fill()
        assert again == [f"{folder.run_id}_0", f"{folder.run_id}_1"]
        # A controller that can't start the trials again counts them as failed.
        assert [trial.status for trial in sweep.look()] == [states.FAILED] * 2
        assert not sweep.live


def test_trials_are_submitted_as_job_arrays_of_consecutive_trial_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[int]] = []
    is_up = True

    def start_alike(runs: Sequence[NewRun], at_once: int) -> None:
        entries = [run.trial for run in runs if run.trial is not None]
        for run, entry in zip(runs, entries, strict=True):
            os.close(make_run(tmp_path / ".paceline" / "runs", run.run_id, trial=entry)[1])
        if not is_up:
            raise EngineError("slurmctld is away.")
        taken.append([int(entry["chosen"]["x"]) for entry in entries])
        assert at_once == 3

    submission = SimpleNamespace(start_alike=start_alike, check_again=lambda job: None)
    monkeypatch.setattr(dispatch, "prepare", lambda *_: submission)
    monkeypatch.setattr(dispatch, "ALIKE_SPAN", 8)
    with sweep_on_disk(
        tmp_path, space={"x": pl.choice(*range(12))}, sampler="grid", trials=11, concurrent=3, array_size=5
    ) as folder:
        sweep, now = SweepState(folder), 0.0
        handing = Dispatcher(sweep, clock=lambda: now)
        handing.fill()
        assert taken == [[0, 1, 2, 3, 4]]
        sweep._live = {4: sweep._live[4]}
        handing.fill()
        assert len(taken) == 1, "an array of more than may run at a time waits for the end of the one before"
        sweep.live.clear()
        is_up = False
        handing.fill()
        assert not sweep.next_folder(5).path.exists()
        is_up, now = True, 1000.0
        handing.fill()
        # An array has consecutive trial numbers. A point that was refused once is submitted again.
        assert taken[1:] == [[5, 6, 7]]
        sweep.live.clear()
        handing.fill()
        assert taken[2:] == [[8, 9, 10]]
        assert sweep.is_done


@pytest.fixture
def sweep(submit: Any, tmp_path: Path) -> Any:
    (tmp_path / "source" / "train.py").write_text(SCRIPT)
    return submit


def of(run: Any, name: str) -> Any:
    return pl.Run(run.experiment, name)


def seen(run: Any, name: str) -> list[list[Any]]:
    """What the checkpoint of a run says: the run and the x of each epoch."""
    found: list[list[Any]] = json.loads((of(run, name).folder.checkpoints / "state.json").read_text())
    return found


@pytest.mark.promise("trial-paused-rung-goes-checkpoints")
def test_trials_pause_at_rungs_and_the_best_resume_from_checkpoints(sweep: Any) -> None:
    run = sweep(
        {"x": pl.choice(0.4, 0.3, 0.2, 0.1)},
        sampler="grid",
        concurrent=1,
        stop=pl.ASHA(first=2, eta=2, last=6, promote=True),
        arguments=("--pause", "0", "--stays-at", "2", "4"),
    )
    assert run.wait_for_completion().status == states.COMPLETED
    s = run.id
    # Trial 0 is the best of two at rung 2. At rung 4 it waits for a second trial, which comes when two of four may leave rung
    # 2.
    lineage = run.lineage()
    assert [(row["run_id"], row["from"], row["status"]) for row in lineage] == [
        (f"{s}_0", None, states.CANCELED),
        (f"{s}_0_2", f"{s}_0", states.CANCELED),
        (f"{s}_0_3", f"{s}_0_2", states.COMPLETED),
        (f"{s}_1", None, states.CANCELED),
        (f"{s}_1_2", f"{s}_1", states.CANCELED),
        (f"{s}_2", None, states.CANCELED),
        (f"{s}_3", None, states.CANCELED),
    ]
    assert lineage[1]["why"] == "ASHA: its best of 0.41 after 2 values is among the best 1 of 2"
    # No epoch was trained twice.
    assert [name for name, _ in seen(run, f"{s}_0_3")] == [f"{s}_0"] * 2 + [f"{s}_0_2"] * 2 + [f"{s}_0_3"] * 2
    rows = run.trial_rows()
    assert [(row["trial"], row["run_id"], row["status"]) for row in rows] == [
        *((0, f"{s}_0_3", states.COMPLETED), (1, f"{s}_1_2", states.CANCELED)),
        *((2, f"{s}_2", states.CANCELED), (3, f"{s}_3", states.CANCELED)),
    ]
    assert rows[0]["intervals"] == 6
    assert rows[0]["score"] == 0.45
    assert run.best_child().id == f"{s}_0_3"
    # A paused trial does not count as failed. A trial that never continued has the reason in a tag.
    paused = of(run, f"{s}_1")
    assert paused.tags["paused"].startswith("ASHA: its best of 0.3")
    assert "stopped" not in paused.tags
    assert (paused.record().canceled_by, paused.record().failure) == (f"sweep {s}", None)
    assert "is not among the best 1 of 2 that came so far" in of(run, f"{s}_1_2").tags["stopped"]
    assert "is not among the best 2 of 4 that came so far" in of(run, f"{s}_3").tags["stopped"]
    assert (of(run, f"{s}_3").folder.outputs / "epoch").exists()
    with (run.folder.outputs / "lineage.csv").open() as file:
        assert [row["run_id"] for row in csv.DictReader(file)] == [row["run_id"] for row in lineage]
    # All seven runs are children of the sweep.
    assert len(list(run.get_children())) == 7


def test_best_of_simultaneous_trials_is_promoted_and_tagged(sweep: Any) -> None:
    run = sweep(
        {"x": pl.choice(0.4, 0.3)},
        sampler="grid",
        trials=2,
        concurrent=2,
        stop=pl.ASHA(first=2, eta=2, last=4, promote=True),
        arguments=("--epochs", "100", "--pause", "0.3"),
    )
    until(lambda: any(row["status"] == "Paused" for row in run.trial_rows()))
    first = of(run, f"{run.id}_0")
    # On a busy machine, trial 0 may reach its rung first and wait there for trial 1.
    until(lambda: PROMOTED in first.tags or len(run.lineage()) == 3)
    assert first.tags.get(RUNG) == "2" or run.lineage()[1]["why"].endswith("best 1 of 2")
    run.cancel()
    until(lambda: run.record().is_terminal)
    assert [row["status"] for row in run.trial_rows()] == [states.CANCELED] * 2


@pytest.mark.promise("controller-killed-promotes")
def test_killed_controller_resumes_promotions(sweep: Any, tmp_path: Path) -> None:
    go = hold_script(tmp_path)
    run = sweep(
        {"x": pl.choice(0.6, 0.5, 0.4, 0.3, 0.2, 0.1)},
        sampler="grid",
        concurrent=2,
        stop=pl.ASHA(first=2, eta=2, last=6, promote=True),
    )
    killed: set[int] = set()

    def is_over() -> bool:
        record = run.record()
        pid = record.owner["pid"]
        may_be = len(killed) < 5 and pid not in {os.getpid(), *killed} and not record.is_terminal
        if may_be and processes.send(pid, signal.SIGKILL):
            killed.add(pid)
        if len(killed) == 3:
            go.touch()
        return bool(record.is_terminal)

    until(is_over)
    assert len(killed) >= 3
    assert run.status == states.COMPLETED
    rows, lineage = run.trial_rows(), run.lineage()
    assert [row["trial"] for row in rows] == list(range(6))
    assert rows[0]["status"] == states.COMPLETED
    assert rows[0]["intervals"] == 6
    # Each run continues from the run before it. No run was started twice, and none is left over.
    assert [row["run_id"] for row in lineage] == sorted({row["run_id"] for row in lineage})
    for row in lineage:
        runs = list(dict.fromkeys(name for name, _ in seen(run, row["run_id"])))
        assert runs == [other["run_id"] for other in lineage if other["trial"] == row["trial"]][: len(runs)]
        assert of(run, row["run_id"]).status in (states.CANCELED, states.COMPLETED)
    assert not list(run.folder.path.parent.glob(".new-*"))


@pytest.mark.promise("script-told-budget-ends-itself")
def test_sweep_that_pauses_trials_fails_with_a_warning_if_its_script_writes_no_checkpoint(sweep: Any) -> None:
    run = sweep(
        {"x": pl.uniform(0, 1)},
        trials=20,
        concurrent=2,
        stop=pl.ASHA(first=2, eta=2, last=6, promote=True),
        arguments=("--forgets",),
    )
    with pytest.raises(
        pl.errors.RunFailedError, match="none has written a checkpoint to the folder PACELINE_CHECKPOINT_DIR"
    ):
        run.wait_for_completion()
    assert "it can't go on" in run.record().warnings[0]
    assert len(run.trial_rows()) < 20


@pytest.mark.promise("script-told-budget-ends-itself")
def test_trial_with_a_budget_argument_ends_at_its_rung(sweep: Any) -> None:
    run = sweep(
        {"x": pl.choice(0.4, 0.3)},
        sampler="grid",
        concurrent=1,
        stop=pl.ASHA(first=2, eta=2, last=5, promote=True, budget="--epochs"),
        arguments=("--epochs", "9", "--pause", "0"),
    )
    assert run.wait_for_completion().status == states.COMPLETED
    assert [(row["run_id"], row["status"], row["intervals"]) for row in run.lineage()] == [
        *((f"{run.id}_0", states.COMPLETED, 2), (f"{run.id}_0_2", states.COMPLETED, 2)),
        *((f"{run.id}_0_3", states.COMPLETED, 1), (f"{run.id}_1", states.COMPLETED, 2)),
    ]
    words = [of(run, row["run_id"]).record().job.arguments for row in run.lineage()]
    assert words[0] == ("--pause", "0", "--x", "0.4", "--epochs", "2")
    assert [word[-1] for word in words] == ["2", "4", "5", "2"]


@pytest.mark.promise("population-trains-step-worst-take")
def test_population_replaces_worst_trials_by_copies_of_the_best(sweep: Any) -> None:
    run = sweep(
        {"x": pl.loguniform(0.001, 10)},
        points=[{"x": 0.001}, {"x": 1}, {"x": 0.1}, {"x": 0.01}],
        trials=4,
        concurrent=4,
        stop=pl.PopulationBasedTraining(interval=2, last=6, resample=0),
        arguments=("--pause", "0", "--stays-at", "2", "4"),
    )
    assert run.wait_for_completion().status == states.COMPLETED
    lineage, s = run.lineage(), run.id
    assert [row["run_id"] for row in lineage] == [
        f"{s}_{number}{leg}" for number in range(4) for leg in ("", "_2", "_3")
    ]
    by_id = {row["run_id"]: row for row in lineage}
    assert by_id[f"{s}_0_2"]["from"] == f"{s}_1"
    assert "a copy of trial 1, number 1 of 4 with 1.01, for 0.011 is number 4; x 1 -> " in by_id[f"{s}_0_2"]["why"]
    assert by_id[f"{s}_0_2"]["x"] in (0.8, 1.2)
    assert [by_id[f"{s}_{number}_2"]["from"] for number in (1, 2, 3)] == [f"{s}_{number}" for number in (1, 2, 3)]
    # The copy has the first epochs of its source, and then its own value.
    x = by_id[f"{s}_0_2"]["x"]
    assert seen(run, f"{s}_0_2") == [[f"{s}_1", 1.0]] * 2 + [[f"{s}_0_2", x]] * 2
    assert [row["intervals"] for row in run.trial_rows()] == [6] * 4
    assert [by_id[f"{s}_{number}_3"]["status"] for number in range(4)] == [states.COMPLETED] * 4
    # After two more generations, the best trial is trial 1 or a copy of it.
    assert run.best_point()["x"] >= 0.8
    assert run.best_child().id.endswith("_3")


def test_adding_trials_can_promote_a_paused_trial(sweep: Any) -> None:
    run = sweep(
        {"x": pl.choice(0.4, 0.3, 0.2, 0.1)},
        sampler="grid",
        trials=2,
        concurrent=1,
        stop=pl.ASHA(first=2, eta=2, last=4, promote=True),
        arguments=("--epochs", "4", "--pause", "0", "--stays-at", "2"),
    )
    run.wait_for_completion()
    left = of(run, f"{run.id}_1")
    assert "is not among the best 1 of 2" in left.tags["stopped"]
    run.more(2)
    until(lambda: run.spec.trials == 4 and run.record().is_terminal)
    assert [(row["trial"], row["run_id"], row["status"]) for row in run.trial_rows()] == [
        *((0, f"{run.id}_0_2", states.COMPLETED), (1, f"{run.id}_1_2", states.COMPLETED)),
        *((2, f"{run.id}_2", states.CANCELED), (3, f"{run.id}_3", states.CANCELED)),
    ]
    assert "stopped" not in left.tags
