"""What the kernel tells of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from paceline.observe.node import process_state
from tests.helpers import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def test_process_state_is_t_for_a_stopped_process_and_none_for_a_dead_process():
    with subprocess.Popen(["sleep", "1000"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: (process_state.state_of(process.pid) or {}).get("state") == "T", "it is stopped")
        found = process_state.state_of(process.pid)
        assert (found["parent"], found["command"], found["tracer"]) == (os.getpid(), "sleep 1000", 0)
        assert not process_state.catches(process.pid, signal.SIGURG)
        process.kill()
    assert process_state.state_of(process.pid) is None


def test_process_blocked_writing_to_a_full_pipe_is_reported_with_the_process_that_reads_the_pipe():
    read, write = os.pipe()
    with subprocess.Popen(["cat", "/dev/zero"], stdout=write) as process:
        os.close(write)
        try:
            wait_until(lambda: "pipe" in process_state.state_of(process.pid)["wchan"], "the pipe is full")
            call = process_state.waits_for(process.pid)
            if call is None:
                pytest.skip("this user, or this machine, may not see system calls of processes")
            assert call.startswith("write to pipe:[")
            assert os.getpid() in process_state.other_end(process.pid, call)
        finally:
            process.kill()
            os.close(read)


def test_functions_tell_whether_a_process_handles_a_signal_and_has_a_file_open(tmp_path):
    path = tmp_path / "stacks"
    with open(path, "w") as file:
        assert process_state.has_open(os.getpid(), file.fileno(), str(path))
        assert not process_state.has_open(os.getpid(), 0, str(path))
    assert process_state.catches(os.getpid(), signal.SIGINT) == (
        signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL)
    )
    assert process_state.is_python(os.getpid())
