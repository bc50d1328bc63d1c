"""Programs with loaded libraries outlive the processes that use them, and are replaced if they are killed."""

from __future__ import annotations

import os
import signal
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.system import processes
from tests.engines.conftest import require_engine
from tests.helpers import start_python, wait_until
from tests.warm import NUMPY, close_all, program, programs, sharing
from tests.warm.kinds import KINDS


@pytest.fixture(autouse=True)
def engine() -> None:
    require_engine("numpy", find_spec("numpy"))


def code_of_a_script(folder: Path) -> int:
    script = folder / "script.py"
    script.write_text("import sys; sys.exit(7)")
    with (folder / "output").open("w") as output:
        process = program(0, NUMPY).start([str(script)], os.environ, output.fileno())
    return process.wait(120)


def test_client_killed_before_its_request_does_not_end_the_fork_server(tmp_path: Path) -> None:
    started = program(0, NUMPY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(started.path)
    assert code_of_a_script(tmp_path) == 7
    assert program(0, NUMPY) is started


def test_forked_script_ends_if_the_unix_process_group_of_its_starter_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    code = (
        "import os, sys\n"
        "from tests.warm import NUMPY, program\n"
        "print(program(0, NUMPY).process.pid, flush=True)\n"
        "program(0, NUMPY).start(sys.argv[1:], os.environ, 1).wait(600)\n"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    asks = start_python(code, tmp_path / "script.py", environment=environment, start_new_session=True)
    assert asks.stdout is not None
    pids = [int(asks.stdout.readline()) for _ in range(2)]
    os.killpg(asks.pid, signal.SIGTERM)
    wait_until(lambda: not any(map(processes.is_alive, pids)), "both have ended")
    asks.communicate()


def test_killed_fork_server_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before: Any = program(0, NUMPY)
    os.kill(before.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, before.process.pid, os.WEXITED | os.WNOWAIT)
    assert code_of_a_script(tmp_path) == 7
    assert program(0, NUMPY) is not before
    assert "has ended: exit code -9" in capfd.readouterr().err


def test_shared_fork_server_serves_several_processes_and_ends_when_its_owner_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, NUMPY, KINDS[NUMPY]._replace(is_shared=True))
    shared = sharing.Sharing()
    monkeypatch.setattr(sharing, "folder", Path(shared.folder))
    found: list[Any] = []
    # In each round, this process knows no running program, as at the start of a new process.
    for _ in range(2):
        monkeypatch.setattr(programs, "_started", {})
        found.append(program(0, NUMPY))
        assert code_of_a_script(tmp_path) == 7
        close_all()
        assert not found[-1].has_ended
    assert found[0].socket == found[1].socket
    assert found[0].pid not in processes.descendants(os.getpid())
    os.kill(found[0].pid, signal.SIGKILL)
    wait_until(lambda: found[0].has_ended, "it has ended")
    assert code_of_a_script(tmp_path) == 7, "whoever comes next starts it again"
    again = program(0, NUMPY)
    assert again.socket != found[0].socket
    shared.close()
    wait_until(lambda: again.has_ended, "it has ended")
    assert not os.path.exists(shared.folder)
