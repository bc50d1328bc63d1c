"""A process forked by an engine's process ends without help: it owns neither the engine nor MPI."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, time
import numpy
from paceline import collectives
from paceline.collectives import engine as module
engine = collectives.start()
# As if threads of the parent were in the middle of something: an operation, and a start or stop.
loop = engine._sets.loops[0]
loop._turn.acquire()
in_flight = engine.allreduce("in flight", numpy.ones(1))
module._lock.acquire()
child = os.fork()
if child == 0:
    assert collectives.current() is None
    collectives.stop()
    try:
        in_flight.wait()
    except collectives.ShutDownError as error:
        assert "was forked from rank 0" in str(error)
    else:
        sys.exit("the child has its parent's result")
    try:
        engine.barrier().wait()
    except collectives.ShutDownError as error:
        assert "was forked from rank 0" in str(error)
    else:
        sys.exit("the child took its parent's place")
    sys.exit(7)
deadline = time.monotonic() + 100
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
        os.kill(child, 9)
        sys.exit("the child hangs")
    time.sleep(0.01)
module._lock.release()
loop._turn.release()
assert in_flight.wait(120).tolist() == [1]
print(os.waitstatus_to_exitcode(ended[1]))
"""


def test_forked_child_of_a_process_with_a_running_engine_exits_without_deadlock() -> None:
    """Regression: if another thread held a lock of the engine during the fork, the child waited for this lock forever."""
    pytest.importorskip("mpi4py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout.strip() == "7", done.stderr
