"""Calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from paceline.errors import EngineError, TargetError
from paceline.targets.polling import Lookout, all_within, said, within
from tests.helpers import wait_until


def test_hanging_target_does_not_delay_the_others():
    never = threading.Event()
    answers = all_within({"quick": lambda: 1, "slow": lambda: never.wait(60), "wrong": lambda: 1 // 0}, 2.0)
    never.set()
    assert answers["quick"] == 1
    assert isinstance(answers["slow"], TimeoutError)
    assert str(answers["slow"]) == "no answer in 2 s"
    assert isinstance(answers["wrong"], ZeroDivisionError)


def test_error_text_includes_the_class_name_unless_paceline_defines_the_exception():
    assert said(TargetError("the host is down.")) == "the host is down."
    assert said(KeyError("x")) == "KeyError: 'x'"
    assert isinstance(within(lambda: {}[0], 5), KeyError)


def test_background_polling_never_blocks_and_ignores_failed_polls() -> None:
    answers: Iterator[int | EngineError] = iter([3, EngineError("away"), 5])
    gate = threading.Event()

    def look() -> int:
        gate.wait(60)
        answer = next(answers, 5)
        if isinstance(answer, Exception):
            raise answer
        return answer

    lookout = Lookout(look, 0.0, 0)
    assert lookout.found() == 0, "at once, though the engine does not answer"
    gate.set()
    found = []
    wait_until(lambda: found.append(lookout.found()) or found[-1] == 5, "the third answer")
    assert set(found) <= {0, 3, 5}
