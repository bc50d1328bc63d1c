from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from paceline import checkpoint
from paceline.checkpoint.leaving import TimeLimit
from paceline.system import run_variables

LOOP = """
import os, signal, sys, time
from paceline import checkpoint
{before}
for step in range(1, 100_000):
    checkpoint.save({{"step": step}}, step, every=50_000, folder=sys.argv[1])
    if step == 3:
        print("ready", flush=True)
    time.sleep(0.002)
"""


@pytest.fixture
def start(tmp_path):
    """Start the loop of steps, in which nothing is due; it is running when this returns."""
    started = []

    def start(before="", after=None, **variables):
        text = LOOP.format(before=before) if after is None else after
        process = subprocess.Popen(
            [sys.executable, "-c", text, str(tmp_path)],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.promise("sigterm-before-time-limit-more")
def test_sigterm_saves_a_checkpoint_of_the_last_completed_step_and_ends_the_process(tmp_path, start):
    process = start()
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    found = checkpoint.latest(tmp_path)
    assert found.step == found.state["step"] >= 3


def test_second_sigterm_ends_a_script_that_has_not_saved_since_the_first(tmp_path, start):
    text = """
import sys, time
from paceline import checkpoint
checkpoint.save({}, 1, every=2, folder=sys.argv[1])
print("ready", flush=True)
while True:
    time.sleep(0.01)
    print("on", flush=True)
"""
    process = start(after=text)
    process.terminate()
    # The first signal waits for the next call of `save`, which never comes, so the process continues.
    assert [process.stdout.readline() for _ in range(50)][-1] == "on\n"
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert checkpoint.latest(tmp_path) is None


def test_sigterm_calls_the_scripts_own_signal_handler_and_saves_no_checkpoint(tmp_path, start):
    process = start("signal.signal(signal.SIGTERM, lambda *_: os._exit(7))")
    process.terminate()
    assert process.wait(60) == 7
    assert checkpoint.latest(tmp_path) is None


def test_sigterm_ends_a_forked_child_of_a_script_that_saves_checkpoints(tmp_path, start):
    text = """
import os, signal, sys, time
from paceline import checkpoint
checkpoint.save({}, 1, every=2, folder=sys.argv[1])
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
os.kill(child, signal.SIGTERM)
os._exit(0 if os.waitpid(child, 0)[1] == signal.SIGTERM and print("ready", flush=True) is None else 1)
"""
    assert start(after=text).wait(60) == 0


@pytest.mark.promise("sigterm-before-time-limit-more")
def test_resize_request_ends_the_worker_after_a_complete_checkpoint(tmp_path, start):
    request = tmp_path / "request"
    process = start(PACELINE_ELASTIC_REQUEST=str(request))
    request.touch()
    assert process.wait(60) == run_variables.EXIT_RESIZE == 79
    assert checkpoint.latest(tmp_path).step >= 3


#: In this program, a stand-in for torch's store waits in C++ code nearly all the time. The requests get no answer,
#: because rank 0 does not exist.
ENDS_MEANWHILE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from paceline import checkpoint
from paceline.checkpoint import leaving
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
class Slow:
    def check(self, names):
        try:
            store.wait(names, timedelta(seconds=0.05))
        except dist.DistStoreError:
            return False
leaving.default_store = Slow
checkpoint.save({}, 1, every=2, folder=sys.argv[1])
time.sleep(0.5)
print("ready", flush=True)
"""


def test_worker_that_finishes_while_a_resize_is_requested_exits_with_0(tmp_path, start):
    pytest.importorskip("torch")
    request = tmp_path / "resize"
    request.touch()
    world = {"RANK": "1", "WORLD_SIZE": "2", run_variables.REQUEST_VARIABLE: str(request)}
    assert start(after=ENDS_MEANWHILE, **world).wait(60) == 0


def test_one_save_is_requested_shortly_before_the_time_limit():
    limit = TimeLimit({"PACELINE_END_TIME": "1000", "SLURM_JOB_END_TIME": "5000"})
    limit.took(5.0)
    calls = {now: limit.asked(now) for now in (900.0, 920.0, 939.0, 941.0, 950.0)}
    # A save is requested 60 s before the time limit of 1000 s. Of these, 10 s are a reserve, and 50 s are twice the sum
    # of 20 s between two calls and 5 s for a save.
    assert calls == {900.0: None, 920.0: None, 939.0: None, 941.0: "limit", 950.0: None}


def test_invalid_time_limit_requests_no_save():
    assert TimeLimit({"PACELINE_END_TIME": "soon"}).asked(1e12) is None
