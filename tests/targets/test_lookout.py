"""Asking an engine in the background."""

from __future__ import annotations

import threading

from paceline.errors import EngineError
from paceline.targets.lookout import Lookout
from tests.helpers import wait_until


def test_nobody_waits_for_an_engine_and_one_that_fails_changes_nothing() -> None:
    answers, gate = iter([3, EngineError("away"), 5]), threading.Event()

    def look() -> int:
        gate.wait(60)
        answer = next(answers, 5)
        if isinstance(answer, Exception):
            raise answer
        return answer

    lookout = Lookout(look, 0.0)
    assert lookout.found() == 0, "at once, though the engine does not answer"
    gate.set()
    found = []
    wait_until(lambda: found.append(lookout.found()) or found[-1] == 5, "the third answer")
    assert set(found) <= {0, 3, 5}
