from __future__ import annotations

from pathlib import Path

import paceline as pl
from paceline.runs import states, store, tags_and_properties
from paceline.sweeps.live.board import Board
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from tests.sweeps.made import add_trial, log_values, make_sweep

SPEC = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", goal="minimize")


def test_each_look_sees_what_has_come(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC, states.RUNNING)
    board = Board(sweep)
    assert board.look().trials == ()
    first = add_trial(sweep, 0, {"x": 0.1}, (3.0,), states.RUNNING)
    add_trial(sweep, 1, {"x": 0.2}, (2.0,), states.FAILED)
    assert [(t.status, t.curve) for t in board.look().trials] == [("Running", (3.0,)), ("Failed", (2.0,))]
    log_values(first, "loss", (1.0,))
    store.change(first, store.stored(first), states.COMPLETED)
    standing = board.look()
    assert (standing.record.status, standing.spec) == ("Running", SPEC)
    assert [(t.status, t.curve) for t in standing.trials] == [("Completed", (3.0, 1.0)), ("Failed", (2.0,))]


def test_a_trial_that_was_paused_is_followed_in_its_next_run(tmp_path: Path) -> None:
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", goal="minimize", stop=pl.ASHA(promote=True))
    sweep = make_sweep(tmp_path, spec, states.RUNNING)
    first = add_trial(sweep, 0, {"x": 0.1}, (3.0, 2.0), states.RUNNING, first_step=0)
    board = Board(sweep)
    assert board.look().trials[0].shown == states.RUNNING
    tags_and_properties.set_tags(first.notes, {"paused": "it waits"})
    store.change(first, store.stored(first), states.CANCELED)
    assert [(t.shown, t.status) for t in board.look().trials] == [("Paused", states.CANCELED)]
    told = {"from": first.run_id, "rung": 2, "why": "it is good"}
    # It goes on from a checkpoint of before the last value.
    second = add_trial(sweep, 0, {"x": 0.1}, (1.5,), states.RUNNING, leg=2, first_step=1, told=told)
    (trial,) = board.look().trials
    assert (trial.run_id, trial.shown, trial.curve, trial.rung) == (second.run_id, states.RUNNING, (3.0, 1.5), 2)
    log_values(second, "loss", (1.0,), 2)
    assert board.look().trials[0].curve == (3.0, 1.5, 1.0)
    tags_and_properties.set_tags(second.notes, {"paused": "it waits again"})
    store.change(second, store.stored(second), states.CANCELED)
    assert board.look().trials[0].shown == "Paused"
    # The sweep's end is that of what waits.
    tags_and_properties.set_tags(second.notes, {"stopped": "it was not good enough"})
    store.change(sweep, store.stored(sweep), states.COMPLETED)
    assert board.look().trials[0].shown == states.CANCELED
