"""Commands beside the workers of a run on this machine."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from paceline.runs import states
from tests.engines.beside import WAITS, check_exec
from tests.engines.lab import Lab, wait_for_end, wait_for_status


@pytest.mark.promise("command-beside-worker-folder-variables")
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_exec_runs_a_command_in_the_environment_of_a_worker(
    lab: Lab, backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "mpi":
        request.getfixturevalue("any_mpirun")
    values = {"process_count_per_node": 2, "distributed_backend": backend}
    check_exec(lab.submit(WAITS, environment_variables={"MINE": "abc"}, **values))


@pytest.mark.promise("command-beside-worker-folder-variables")
def test_exec_with_a_terminal_runs_an_interactive_shell(lab: Lab) -> None:
    run = lab.submit(WAITS)
    wait_for_status(run, states.RUNNING)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PACELINE_WORKSPACE": str(run.folder.path.parent.parent), "TERM": "xterm"}
    command = [sys.executable, "-m", "paceline", "exec", run.id, "--", "sh", "-i"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        _read_until(ours, b"# ", b"$ ")
        os.write(ours, b"test -t 0 && test -t 1 && stty size && echo ter''minal\r")
        assert b"terminal\r\n" in _read_until(ours, b"terminal\r\n")
        # Ctrl-C must reach the command, not the test.
        os.write(ours, b"sleep 600\r")
        _read_until(ours, b"sleep 600")
        time.sleep(0.3)
        os.write(ours, b"\x03")
        _read_until(ours, b"# ", b"$ ")
        os.write(ours, b"exit 9\r")
        assert process.wait(60) == 9
    os.close(ours)
    run.cancel()
    assert wait_for_end(run) == states.CANCELED


def _read_until(fd: int, *ends: bytes) -> bytes:
    found = b""
    while not any(end in found for end in ends):
        found += os.read(fd, 4096)
    return found
