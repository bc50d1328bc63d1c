"""Trials handed over to an engine that does not take them, by a clock of the test's own."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import EngineError
from paceline.runs import states, store
from paceline.sweeps import handing_over
from paceline.sweeps.handing_over import HandingOver
from paceline.sweeps.sweep_state import SweepState
from tests.helpers import make_run
from tests.sweeps.helpers import sweep_on_disk


class Engine:
    """Takes trials where it is up. asked: when, and for which."""

    def __init__(self, tmp_path: Path) -> None:
        self.is_up = False
        self.now = 0.0
        self.asked: list[tuple[float, str]] = []
        self.points: list[dict[str, Any]] = []
        self._runs_dir = tmp_path / ".paceline" / "runs"

    def submit(self, *_: Any, run_id: str, trial: dict[str, Any], **__: Any) -> Any:
        self.asked.append((self.now, run_id[-1]))
        self.points.append(trial["chosen"])
        folder, fd = make_run(self._runs_dir, run_id, trial=trial)
        if not self.is_up:
            # As `submit` leaves it: a trial without a process.
            store.change(folder, store.stored(folder), states.FAILED)

            os.close(fd)
            raise EngineError("slurmctld is away.")
        os.close(fd)
        return folder

    def pass_time(self, handing: HandingOver, first: int, last: int) -> None:
        for self.now in range(first, last):
            handing.fill()


def test_an_engine_that_takes_nothing_is_asked_ever_less_and_not_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    monkeypatch.setattr(handing_over, "submit", engine.submit)
    with sweep_on_disk(tmp_path, space={"x": pl.choice(*range(100))}, concurrent=2, sampler="random") as folder:
        sweep = SweepState(folder)
        handing = HandingOver(sweep, clock=lambda: engine.now)
        with pytest.raises(
            EngineError, match=r"'local' has taken no trial for 6\d minutes: slurmctld is away"
        ) as caught:
            engine.pass_time(handing, 0, 10_000)
        assert f"paceline sweep more {folder.run_id}" in str(caught.value)
        times = [time for time, _ in engine.asked]
        assert times[:8] == [0, 5, 15, 35, 75, 155, 315, 615]
        assert {number for _, number in engine.asked} == {"0"}
        # The same point all the time: a sampler that is asked twice for a trial proposes something else.
        assert all(point == engine.points[0] for point in engine.points)
        assert "does not take trial 0: slurmctld" in str(store.stored(folder).waiting_for)
        assert not sweep.next_folder(0).path.exists()


def test_an_engine_that_takes_trials_again_is_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    monkeypatch.setattr(handing_over, "submit", engine.submit)
    with sweep_on_disk(tmp_path, space={"x": pl.choice(*range(100))}, concurrent=2) as folder:
        sweep = SweepState(folder)
        handing = HandingOver(sweep, clock=lambda: engine.now)
        engine.pass_time(handing, 0, 3000)
        engine.is_up = True
        engine.pass_time(handing, 3000, 3400)
        assert len(sweep.trials) == 2
        assert store.stored(folder).waiting_for is None
        # While one runs the engine may well be full: that is waited for however long it takes.
        engine.is_up = False
        sweep.trials[1] = dataclasses.replace(sweep.trials[1], status=states.COMPLETED)
        del sweep.live[1]
        engine.pass_time(handing, 3400, 20_000)
        assert len(sweep.trials) == 2
        del sweep.live[0]
        with pytest.raises(EngineError, match="has taken no trial"):
            engine.pass_time(handing, 20_000, 30_000)


def test_a_trial_whose_submission_was_cut_off_is_handed_over_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[str] = []
    monkeypatch.setattr(handing_over, "submit_again", lambda folder, values: again.append(folder.run_id))
    with sweep_on_disk(tmp_path, space={"x": pl.choice(*range(100))}, seed=1, trials=2) as folder:
        for number in range(2):
            told = {"number": number, "chosen": {"x": 70 + number}, "values": {"x": 70 + number}}
            os.close(make_run(folder.path.parent, f"{folder.run_id}_{number}", trial=told)[1])
        sweep = SweepState(folder)
        sweep.take_up()
        assert [(trial.status, trial.chosen["x"]) for trial in sweep.trials] == [
            (states.NOT_STARTED, x) for x in (70, 71)
        ]
        # As its record says, it has failed; but nothing of it has ever run.
        assert sweep.look() == []
        HandingOver(sweep).fill()
        assert again == [f"{folder.run_id}_0", f"{folder.run_id}_1"]
        # Where it does not start again, that is no kill any more.
        assert [trial.status for trial in sweep.look()] == [states.FAILED] * 2
        assert not sweep.live


def test_trials_in_arrays_are_handed_over_together_and_one_array_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[int]] = []
    is_up = True

    def submit_alike(trials: Any, *_: Any, at_once: int, **__: Any) -> None:
        for run_id, _, told in trials:
            os.close(make_run(tmp_path / ".paceline" / "runs", run_id, trial=told)[1])
        if not is_up:
            raise EngineError("slurmctld is away.")
        taken.append([told["chosen"]["x"] for _, _, told in trials])
        assert at_once == 3

    monkeypatch.setattr(handing_over, "submit_alike", submit_alike)
    monkeypatch.setattr(handing_over, "ALIKE_SPAN", 8)
    with sweep_on_disk(
        tmp_path, space={"x": pl.choice(*range(12))}, sampler="grid", trials=11, concurrent=3, array_size=5
    ) as folder:
        sweep, now = SweepState(folder), 0.0
        handing = HandingOver(sweep, clock=lambda: now)
        handing.fill()
        assert taken == [[0, 1, 2, 3, 4]]
        sweep.live = {4: sweep.live[4]}
        handing.fill()
        assert len(taken) == 1, "an array of more than may run at a time waits for the end of the one before"
        sweep.live.clear()
        is_up = False
        handing.fill()
        assert not sweep.next_folder(5).path.exists()
        is_up, now = True, 1000.0
        handing.fill()
        # Numbers of one array are of one span. A point that was refused once comes again.
        assert taken[1:] == [[5, 6, 7]]
        sweep.live.clear()
        handing.fill()
        assert taken[2:] == [[8, 9, 10]]
        assert sweep.is_done
