"""Calls that may never return."""

from __future__ import annotations

import threading

from paceline.errors import TargetError
from paceline.targets.timeouts import all_within, said, within


def test_one_that_hangs_does_not_hold_up_the_others():
    never = threading.Event()
    answers = all_within({"quick": lambda: 1, "slow": lambda: never.wait(20), "wrong": lambda: 1 // 0}, 0.2)
    never.set()
    assert answers["quick"] == 1
    assert isinstance(answers["slow"], TimeoutError)
    assert str(answers["slow"]) == "no answer in 0.2 s"
    assert isinstance(answers["wrong"], ZeroDivisionError)


def test_what_is_said_of_an_error_has_its_name_unless_it_is_one_of_ours():
    assert said(TargetError("the host is down.")) == "the host is down."
    assert said(KeyError("x")) == "KeyError: 'x'"
    assert isinstance(within(lambda: {}[0], 5), KeyError)
