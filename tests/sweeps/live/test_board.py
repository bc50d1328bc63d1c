from __future__ import annotations

from pathlib import Path

import paceline as pl
from paceline.runs import states, store
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
