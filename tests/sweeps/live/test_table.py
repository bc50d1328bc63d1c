from __future__ import annotations

from typing import Any

import paceline as pl
from paceline.runs import states
from paceline.runs.failure import FailureReport
from paceline.sweeps.live.board import Standing
from paceline.sweeps.live.table import shown
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from tests.helpers import make_record

SPEC = SweepSpec(space=Space({"--x": pl.uniform(0, 1), "y": pl.choice(1, [2])}), metric="loss", goal="minimize")
TIMES = {"started_utc": "2026-01-01T00:00:00Z", "ended_utc": "2026-01-01T00:00:02Z"}


def trial(number: int, value: float | None, status: str = states.COMPLETED, **values: Any) -> Trial:
    curve = () if value is None else (value,)
    return Trial(number=number, run_id="", status=status, curve=curve, values={"--x": 0.125} | values, **TIMES)


def standing(*trials: Trial, **record: Any) -> Standing:
    given = {"status": states.RUNNING, "kind": "sweep", **TIMES}
    return Standing(record=make_record(**(given | record)), spec=SPEC, trials=trials)


def test_the_best_stand_first_and_what_is_missing_is_a_dash():
    seen = shown(standing(trial(0, None, states.FAILED), trial(1, 0.5, y=[2]), trial(2, 0.25)), 10)
    assert seen.header == ("TRIAL", "STATUS", "loss", "VALUES", "TIME", "x", "y")
    assert seen.rows == (
        ("2", "Completed", "0.25", "1", "2.0 s", "0.125", "-"),
        ("1", "Completed", "0.5", "1", "2.0 s", "0.125", "[2]"),
        ("0", "Failed", "-", "0", "2.0 s", "0.125", "-"),
    )
    assert seen.lines[0].endswith("is Running for 2.0 s: 3 of 20 trials ended, 1 failed")
    assert seen.lines[1] == "Best: trial 2, loss 0.25 with x 0.125"


def test_where_there_is_little_room_running_ones_are_seen_beside_the_best():
    ended = [trial(number, number / 10) for number in range(10)]
    running = [trial(number, number / 10, states.RUNNING) for number in range(10, 20)]
    seen = shown(standing(*ended, *running), 6)
    assert [row[0] for row in seen.rows] == ["0", "1", "2", "10", "11", "12"]
    assert seen.more == 14
    assert len(shown(standing(*ended), 6).rows) == 6


def test_warnings_and_the_end_are_told():
    report = FailureReport(cause="trials", message="all trials have failed.")
    record = {"status": states.FAILED, "warnings": ("no metric",), "failure": report}
    lines = shown(standing(trial(0, None, states.CANCELED), **record), 5).lines
    assert lines[0].endswith("is Failed in 2.0 s: 1 of 20 trials ended, 1 stopped")
    assert lines[1:] == ("Warning: no metric", "all trials have failed.")
