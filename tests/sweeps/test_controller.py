"""A sweep's controller whose files or processes disappear."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.children import engine
from paceline.children.retries import Refusals
from paceline.errors import EngineError
from paceline.job.job import Job
from paceline.runs import read, states, store
from paceline.runs.claim import Claim
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.sweeps import controller, start
from paceline.sweeps.controller import Controller
from paceline.sweeps.results import MORE, requested
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import count_anew, more
from paceline.sweeps.sweep_state import SweepState
from paceline.system import locks
from paceline.system.files import write_json
from paceline.system.processes import is_alive
from tests.helpers import remove_in_use, replace_lock
from tests.sweeps.helpers import sweep_on_disk, until
from tests.sweeps.made import add_trial, make_sweep

#: Trial 0 logs its values and waits. Trial 1 reaches a better value later. Both save a file when they get SIGTERM.
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
time.sleep(600)
"""


def test_controller_of_a_removed_sweep_ends_its_trials_and_itself(submit: Any) -> None:
    # Regression: the controller of a removed sweep never ended. It also ignored SIGTERM, because it could not store the
    # request to end in the missing folder.
    run = submit({"x": pl.choice(1, 2)}, sampler="grid", concurrent=1, arguments=("--values", "6000", "--pause", "0.1"))
    until(lambda: [row["status"] for row in run.trial_rows()] == [states.RUNNING])
    pid = run.record().owner["pid"]
    trial = pl.Run(run.experiment, f"{run.id}_0")
    remove_in_use(run.folder.path)

    until(lambda: not is_alive(pid))
    until(lambda: trial.status == states.CANCELED)
    assert trial.tags["stopped"] == "the sweep's folder is gone"
    assert not pl.Run(run.experiment, f"{run.id}_0").folder.path.with_name(f"{run.id}_1").exists()


#: This program is a controller of a sweep, as an engine starts it. It waits only briefly for the lock of the run.
SECOND = """
import sys
from paceline.children.engine import main
from paceline.runs import claim
from paceline.sweeps.controller import Controller
claim._LOCK_S = 0.1
sys.exit(main([sys.argv[1]], Controller))
"""


def test_suspended_controller_excludes_a_second_one_until_its_lock_is_lost(submit: Any) -> None:
    run = submit({"x": pl.choice(1, 2)}, sampler="grid", concurrent=1, arguments=("--values", "6000", "--pause", "0.1"))
    until(lambda: [row["status"] for row in run.trial_rows()] == [states.RUNNING])
    pid = run.record().owner["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        before = run.folder.state.read_bytes()
        second = subprocess.run(
            [sys.executable, "-c", SECOND, run.folder.path], capture_output=True, text=True, check=False
        )
        assert (second.returncode, run.status, run.folder.state.read_bytes()) == (75, states.RUNNING, before)
        assert f"the last supervisor or controller is process {pid} on " in second.stdout
        replace_lock(run.folder.lock)
        assert run.status == states.RUNNING  # this call starts another controller
        until(lambda: run.record().owner["pid"] != pid)
        owner = run.record().owner
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not is_alive(pid))
    assert run.record().owner == owner
    assert [row["status"] for row in run.trial_rows()] == [states.RUNNING]
    run.cancel()
    until(lambda: run.status == states.CANCELED)


#: This program is a controller of a sweep that another controller takes over while this one reads its state.
LATE = """
import sys
from paceline.children.engine import main
from paceline.sweeps.controller import Controller
from paceline.sweeps.sweep_state import SweepState

class Late(Controller):
    @staticmethod
    def read_state(folder):
        folder.lock.write_bytes(b"process 1 on another-host (00000000)")
        return SweepState(folder)

sys.exit(main([sys.argv[1]], Late))
"""


def test_controller_that_another_one_replaces_during_its_start_leaves_the_record(tmp_path: Path) -> None:
    folder = failed_with(tmp_path)
    replace_lock(folder.lock)  # this process holds the lock of the former file
    before = folder.state.read_bytes()
    late = subprocess.run([sys.executable, "-c", LATE, folder.path], capture_output=True, text=True, check=False)
    assert (late.returncode, folder.state.read_bytes()) == (75, before), late.stderr
    assert "process 1 on another-host (00000000) has taken over its work" in late.stdout


class TakenOverError(Exception):
    """The error in the place of the end of a process whose run another process has taken over."""


def _raise_if_lost(claim: Claim) -> None:
    if claim.is_lost():
        raise TakenOverError


@pytest.mark.parametrize("action", ["start a trial", "cancel a trial", "remove a refused trial", "write the end"])
def test_controller_without_its_claim_refuses_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    monkeypatch.setattr(Claim, "check", _raise_if_lost)
    with sweep_on_disk(tmp_path, space={"x": pl.uniform(0, 1)}, concurrent=2, trials=3) as folder:
        trial = add_trial(folder, 0, {"x": 0.5}, (), states.RUNNING, chosen={"x": 0.5})
        found = Controller(folder)
        found.take_up()
        folder.lock.write_bytes(b"process 1 on another-host (00000000)")
        before = folder.state.read_bytes()
        act: dict[str, Callable[[], object]] = {
            "start a trial": found.advance,
            "cancel a trial": lambda: found.stop_all("the sweep is canceled"),
            "remove a refused trial": lambda: found.state.refused(
                "trial 0", [trial], Refusals("lab"), EngineError("no")
            ),
            "write the end": found.write_end,
        }
        with pytest.raises(TakenOverError):
            act[action]()
        assert folder.state.read_bytes() == before
        assert not trial.cancel_request.exists()
        assert sorted(path.name for path in folder.path.parent.glob(f"{folder.run_id}*")) == [
            folder.run_id,
            trial.run_id,
        ]


def test_idle_controller_reads_its_claim_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read the file in each tick, and NFS asks its server for each read."""
    reads: list[Path] = []
    ticks = 0

    class Idle(Controller):
        def look(self) -> None:
            nonlocal ticks
            ticks += 1
            if ticks > 50:
                raise StopIteration
            super().look()

    monkeypatch.setattr(locks, "claimed", reads.append)  # returns None, as if the file could not be read
    monkeypatch.setattr(engine, "_TICK_S", 0.01)
    folder = failed_with(tmp_path, concurrent=1)
    add_trial(folder, 0, {"x": 0.5}, (), states.RUNNING, chosen={"x": 0.5})
    begin = time.monotonic()
    with pytest.raises(StopIteration):
        Idle(folder).run(store.stored(folder))
    assert len(reads) <= 1 + time.monotonic() - begin


@pytest.mark.promise("runs-judged-again-better-curve")
def test_bandit_judges_a_running_trial_again_after_a_better_trial(submit: Any, tmp_path: Path) -> None:
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
    # The policy has judged trial 0 by the values so far, and did not stop it.
    assert not any(row["status"] in states.TERMINAL for row in run.trial_rows())
    go.touch()
    until(lambda: run.trial_rows()[0]["status"] == states.CANCELED)
    first = pl.Run(run.experiment, f"{run.id}_0")
    assert first.tags["stopped"] == (
        "Bandit: its best of 0.5 after 2 values is below 0.75, which the best of all, 0.9, leaves as slack"
    )
    # The trial exits with a failure's code but has not failed: it got SIGTERM and its grace period, and keeps its files.
    assert first.record().failure is None
    assert (first.folder.outputs / "saved").read_text() == "whole"
    assert run.trial_rows()[1]["status"] == states.RUNNING
    run.cancel()
    until(lambda: run.record().is_terminal)
    assert run.best_child().id == f"{run.id}_1"


def failed_with(tmp_path: Path, *errors: str, **values: Any) -> RunFolder:
    """A sweep that runs, whose trials have failed with these errors."""
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", **{"trials": len(errors) or 3, **values})
    folder = make_sweep(tmp_path / "runs", spec, states.RUNNING, job=Job(entry_script="train.py"))
    for number, error in enumerate(errors):
        report = FailureReport(
            cause="exception", message="rank 0 failed", exception=error, see=f"paceline logs trial {number}"
        )
        add_trial(folder, number, {"x": 0.5}, (), states.FAILED, chosen={"x": 0.5}, failure=report)
    return folder


def wanted(folder: RunFolder) -> str | None:
    sweep = SweepState(folder)
    sweep.take_up()
    return controller.end_reason(sweep)


def test_common_failure_cause_is_reported_with_a_log_command(tmp_path: Path) -> None:
    folder = failed_with(tmp_path, "E: a", "E: a")
    sweep = SweepState(folder)
    sweep.take_up()
    controller.write_end(sweep)
    report = store.stored(folder).failure
    assert report is not None
    assert report.message == "all trials have failed. 2 of 2 failed with the same error: E: a"
    assert report.see == "paceline logs trial 0"


@pytest.mark.promise("more-trials-sweep-ended-so")
def test_adding_trials_resets_the_reason_that_ended_the_sweep(tmp_path: Path) -> None:
    folder = failed_with(tmp_path, "E", "E", max_failures=2, max_duration_seconds=3600.0, trials=8)
    record = store.stored(folder)
    assert "max_failures is 2" in str(wanted(folder))
    store.change(folder, record, states.RUNNING, started_utc="2020-01-01T00:00:00.000Z")
    assert wanted(folder) == "the sweep has come to its limit of 3600 s"
    write_json(folder.path / MORE, {"trials": 3})
    count_anew(folder)
    assert not (folder.path / MORE).exists()
    # The sweep has 2 trials and gets 3 more. The trials that it had not started no longer count.
    assert store.stored(folder).sweep["trials"] == 5  # type: ignore[index]
    assert wanted(folder) is None
    for number in (2, 3):
        add_trial(folder, number, {"x": 0.5}, (1.0,), states.FAILED, chosen={"x": 0.5})
    assert "2 trials have failed" in str(wanted(folder))


def test_single_trial_without_the_metric_is_reported_in_the_singular(tmp_path: Path) -> None:
    folder = failed_with(tmp_path, trials=1)
    add_trial(folder, 0, {"x": 0.5}, (1.0,), metric="other", chosen={"x": 0.5})
    assert "1 trial has ended, and it has not logged the primary metric" in str(wanted(folder))


@pytest.mark.promise("more-trials-sweep-ended-so")
def test_sweep_whose_trials_lack_the_metric_ends_and_reopens_for_more_trials(tmp_path: Path) -> None:
    folder = failed_with(tmp_path)
    for number in range(3):
        add_trial(folder, number, {"x": 0.5}, (1.0,), metric="other", chosen={"x": 0.5})
    assert "3 trials have ended, and none has logged the primary metric" in str(wanted(folder))
    # A request for more trials may come when the controller has just recorded the end. Then the controller continues.
    assert not Controller.reopens(folder)
    write_json(folder.path / MORE, {"trials": 5})
    assert Controller.reopens(folder)
    assert store.stored(folder).sweep["trials"] == 8  # type: ignore[index]
    assert wanted(folder) is None


@pytest.mark.parametrize("is_over", [False, True])
def test_request_for_trials_that_comes_while_the_controller_takes_another_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    folder = failed_with(tmp_path, trials=4)
    later: list[threading.Thread] = []
    write = store.write

    def write_late(*values: Any, **options: Any) -> Any:
        if not later:
            later.append(threading.Thread(target=more, args=(folder, 2)))
            later[0].start()
            later[0].join(0.5)
        return write(*values, **options)

    more(folder, 5)
    found = Controller(folder)
    monkeypatch.setattr(store, "write", write_late)
    if is_over:
        count_anew(folder)  # counts only started trials, and this sweep has none
    else:
        found.look()
    later[0].join()
    in_all = int(store.stored(folder).sweep["trials"]) + requested(folder)  # type: ignore[index]
    assert in_all == (7 if is_over else 11)


def test_requests_for_trials_at_the_same_time_add_up(tmp_path: Path) -> None:
    folder = failed_with(tmp_path, trials=4)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: more(folder, 1), range(80)))
    assert requested(folder) == 80


def test_request_for_trials_continues_a_sweep_that_ended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = failed_with(tmp_path, trials=4)
    write = start.write_json

    def write_after_the_end(*values: Any, **options: Any) -> None:
        store.change(folder, store.stored(folder), states.COMPLETED, ended_utc="2026-01-01T00:00:05.000Z")
        write(*values, **options)

    monkeypatch.setattr(start, "write_json", write_after_the_end)
    # The lock is free, although this process still holds it.
    monkeypatch.setattr(start.locks, "take", lambda path: os.open(path, os.O_RDWR))
    started: list[RunFolder] = []
    monkeypatch.setattr(start.controllers, "start", lambda folder, fd: started.append(folder))
    more(folder, 5)
    assert started == [folder]
    assert store.stored(folder).sweep["trials"] == 5  # type: ignore[index]


def test_sweep_ended_by_a_fail_request_is_recorded_as_failed_without_a_waiting_reason(
    tmp_path: Path, capsys: Any
) -> None:
    """Its log said Canceled, and its record went on to name the engine that did not take the next trial."""
    folder = failed_with(tmp_path)
    sweep = SweepState(folder)
    sweep.wait_for("compute target 'cluster', which does not take trial 0")
    read.request_cancel(folder, by="somebody", reason="fail()", fail="it is enough")
    controller.write_end(sweep)
    record = store.stored(folder)
    assert (record.status, record.waiting_for) == (states.FAILED, None)
    assert "the sweep is Failed" in capsys.readouterr().out
