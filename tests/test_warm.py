"""The programs that have libraries loaded outlive those who ask them, and are replaced where something has killed them."""

from __future__ import annotations

import os
import signal
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.conftest import require_engine
from tests.warm import NUMPY, program


@pytest.fixture(autouse=True)
def engine() -> None:
    require_engine("numpy", find_spec("numpy"))


def code_of_a_script(folder: Path) -> int:
    script = folder / "script.py"
    script.write_text("import sys; sys.exit(7)")
    with (folder / "output").open("w") as output:
        process = program(0, NUMPY).start([str(script)], os.environ, output.fileno())
    return process.wait(120)


def test_whoever_is_killed_before_it_asks_does_not_end_it(tmp_path: Path) -> None:
    started = program(0, NUMPY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(started.path)
    assert code_of_a_script(tmp_path) == 7
    assert program(0, NUMPY) is started


def test_one_that_was_killed_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = program(0, NUMPY)
    os.kill(before.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, before.process.pid, os.WEXITED | os.WNOWAIT)
    assert code_of_a_script(tmp_path) == 7
    assert program(0, NUMPY) is not before
    assert "ended with -9" in capfd.readouterr().err
