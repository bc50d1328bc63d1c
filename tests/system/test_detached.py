"""Processes that outlive the program which starts them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.system import detached
from tests.helpers import wait_until, write_tree


def test_one_that_has_ended_is_no_zombie_after_the_next_start(tmp_path: Path) -> None:
    """A program that submits many sweeps, such as a notebook's, would else collect one of each."""
    write_tree(tmp_path, {"library/ends.py": "", "x_1/here": ""})

    def start() -> int:
        with open(tmp_path / "lock", "ab") as lock:
            return detached.start(
                "ends", tmp_path / "x_1", lock.fileno(), python=sys.executable, library_dir=tmp_path / "library"
            ).pid

    first = start()
    # Waited for and left where it is: WNOWAIT takes nothing off the system.
    wait_until(lambda: os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, "it has ended")
    second = start()
    try:
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        pass
    else:
        raise AssertionError("its exit code is still there to be taken")
    detached.started[-1].wait(60)
    assert detached.started[-1].pid == second
