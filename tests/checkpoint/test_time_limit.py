from __future__ import annotations

from paceline.checkpoint.time_limit import TimeLimit


def test_it_is_time_once_shortly_before_the_end():
    limit = TimeLimit({"PACELINE_END_TIME": "1000", "SLURM_JOB_END_TIME": "5000"})
    limit.took(5.0)
    calls = {now: limit.asked(now) for now in (900.0, 920.0, 939.0, 941.0, 950.0)}
    # 10 s to spare, and twice the 20 s between two calls and the 5 s of a save.
    assert calls == {900.0: None, 920.0: None, 939.0: None, 941.0: "limit", 950.0: None}


def test_without_a_limit_it_never_is():
    assert TimeLimit({"PACELINE_END_TIME": "soon"}).asked(1e12) is None
