"""Clocks of nodes, against this machine's and against each other."""

from __future__ import annotations

import time

import pytest

from paceline.doctor import doctor
from paceline.doctor.doctor import check_clocks
from tests.doctor.conftest import answers


def ahead(seconds: float, there_s: float = 0.0, back_s: float = 0.0):
    """A node whose clock is ahead, and to which questions take so long, and answers so long back."""

    def answer(argv):
        time.sleep(there_s)
        now = time.time() + seconds
        time.sleep(back_s)
        return answers(str(now))

    return answer


@pytest.mark.parametrize(
    ("seconds", "level", "seen"),
    [(0, "ok", "that of this machine"), (3, "warn", "3.0 s ahead of"), (-45, "fail", "45.0 s behind this machine's")],
)
def test_clock_check_warns_at_3_seconds_offset_and_fails_at_45_seconds(two, examination, seconds, level, seen):
    two[0].wrong, two[1].wrong = ahead(seconds), ahead(0)
    first, second, between = check_clocks(examination)
    assert (first.node, first.level) == ("node0", level)
    assert seen in first.seen
    assert bool(first.advice) == (level != "ok")
    assert second.level == "ok"
    assert between.level == level
    assert ("node0" in between.seen) == (level != "ok")


def test_two_nodes_with_equally_wrong_clocks_are_reported_as_consistent(two, examination):
    two[0].wrong = two[1].wrong = ahead(10)
    assert [finding.level for finding in check_clocks(examination)] == ["warn", "warn", "ok"]


@pytest.mark.parametrize("slow", [{"there_s": 1.2}, {"back_s": 1.2}])
def test_slow_answer_of_a_node_is_not_reported_as_a_wrong_clock(two, examination, monkeypatch, slow):
    monkeypatch.setattr(doctor, "_SAMPLES", 1)
    two[0].wrong, two[1].wrong = ahead(0.6 if "there_s" in slow else -0.6, **slow), ahead(0)
    assert [finding.level for finding in check_clocks(examination)] == ["ok", "ok", "ok"]


def test_node_with_an_invalid_time_answer_fails_the_clock_check(two, examination):
    two[0].wrong, two[1].wrong = (lambda argv: answers("soon")), ahead(0)
    failed, well = check_clocks(examination)
    assert (failed.node, failed.level, well.level) == ("node0", "fail", "ok")
    assert "told no time" in failed.seen
