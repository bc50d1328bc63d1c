"""A process that an engine's process has forked ends by itself: neither the engine nor MPI is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, time
from paceline import collectives
engine = collectives.start()
child = os.fork()
if child == 0:
    assert collectives.current() is None
    try:
        engine.barrier().wait()
    except collectives.ShutDownError as error:
        assert "was forked from rank 0" in str(error)
    else:
        sys.exit("the child took its parent's place")
    sys.exit(7)
deadline = time.monotonic() + 20
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
        os.kill(child, 9)
        sys.exit("the child hangs")
    time.sleep(0.01)
print(os.waitstatus_to_exitcode(ended[1]))
"""


def test_a_forked_child_ends_by_itself() -> None:
    pytest.importorskip("mpi4py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout.strip() == "7", done.stderr
