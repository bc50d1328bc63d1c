"""Stacks of runs on this machine, of workers that stand still in all kinds of ways."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from paceline.errors import RunStateError
from paceline.runs import states
from tests.engines.lab import Lab, wait_for_end, wait_for_status
from tests.helpers import wait_until

#: In this script, rank 0 waits for a lock in two threads, and has a forked child that also waits. Rank 1 has a signal handler of
#: its own. Rank 2 runs native code that holds the GIL. Rank 3 has become another program by exec.
STANDS = """
import ctypes, os, signal, subprocess, sys, threading, time
rank = os.environ["PACELINE_RANK"]
lock = threading.Lock()
lock.acquire()
def waits_here():
    lock.acquire()
def child_waits():
    time.sleep(1000)
if rank == "0":
    if os.fork() == 0:
        child_waits()
    threading.Thread(target=waits_here, daemon=True, name="second").start()
if rank == "1":
    signal.signal(signal.SIGURG, lambda *_: print("mine", flush=True))
print("up", flush=True)
if rank == "2":
    # Holds the interpreter all the time, and goes on after a signal.
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
if rank == "3":
    os.execv("/bin/sleep", ["sleep", "1000"])
if rank == "1":
    while True:
        time.sleep(0.01)
waits_here()
"""


def functions(process: dict) -> list[list[str]]:
    return [[frame["function"] for frame in thread["frames"]] for thread in process.get("threads") or ()]


@pytest.mark.promise("paceline-stacks-gives-stacks-threads")
def test_paceline_stacks_shows_the_line_at_which_each_worker_is_blocked(lab: Lab) -> None:
    run = lab.submit(STANDS, process_count_per_node=4, distributed_backend="gloo")
    wait_for_status(run, states.RUNNING)
    wait_until(
        lambda: (
            "".join(run.folder.live_log(r).read_text() for r in range(4) if run.folder.live_log(r).exists()).count("up")
            == 4
        ),
        "all are up",
        120,
    )
    # Repeat the stack dumps: a rank prints `up` just before the call in which it waits, so the first dump may come too
    # early.
    looks = []

    def all_stand() -> bool:
        looks.append(run.stacks())
        ranks = looks[-1].ranks
        main = [next(iter(functions(one)), []) for one in (ranks[0], *ranks[0].get("children", ()), ranks[2])]
        return (
            [frames[:2] for frames in main[:-1]] == [["waits_here", "<module>"], ["child_waits", "<module>"]]
            and main[-1][:1] == ["<module>"]
            and any("waits_here" in frames for frames in functions(ranks[0])[1:])
            and (ranks[1].get("by") == "py-spy" or "handler of its own" in ranks[1].get("silent", ""))
            and "sleep" in ranks[3].get("command", "")
        )

    wait_until(all_stand, "each rank stands where it waits", 60)
    found = looks[-1]
    ranks = found.ranks
    assert functions(ranks[0])[0][:2] == ["waits_here", "<module>"]
    assert "waits_here" in functions(ranks[0])[1]
    (child,) = ranks[0]["children"]
    assert functions(child)[0][:2] == ["child_waits", "<module>"]
    assert child["pid"] != ranks[0]["pid"]
    # The script's own handler of rank 1 was called and still works.
    wait_until(lambda: "mine" in run.folder.live_log(1).read_text(), "the handler was called")
    assert ranks[1].get("by") == "py-spy" or "handler of its own" in ranks[1]["silent"]
    assert functions(ranks[2])[0][0] == "<module>"
    assert ranks[2]["by"] == "faulthandler"
    assert ranks[3].get("silent") == "it is another program, or has closed all files"
    text = str(found)
    assert "Rank 0:\n  thread main\n    train.py:7 waits_here\n" in text, text
    assert "worker/__main__.py" not in text
    # The workers continue to run, even if several processes request stacks at the same time.
    asked = [threading.Thread(target=run.stacks) for _ in range(3)]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join()
    assert run.status == states.RUNNING
    environment = {**os.environ, "PACELINE_WORKSPACE": str(lab.workspace_dir)}
    command = [sys.executable, "-m", "paceline", "stacks", run.id, "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, env=environment, check=True, timeout=120).stdout)
    assert told["ranks"]["2"]["pid"] == ranks[2]["pid"]
    assert told["waiting"] == []
    os.kill(ranks[0]["pid"], signal.SIGSTOP)
    stopped = run.stacks()
    assert stopped.waiting == [
        text for text in stopped.waiting if text.startswith("Rank 0: it is stopped, by SIGSTOP or Ctrl-Z")
    ]
    assert len(stopped.waiting) == 1
    run.cancel()
    assert wait_for_end(run) == states.CANCELED
    with pytest.raises(RunStateError, match="is Canceled: its workers have stacks while it is Running"):
        run.stacks()
    # No data of the stack dumps is left in the run's folder or in memory.
    assert [path for path in run.folder.path.rglob("*") if "exec" in path.name] == []
    assert not run.folder.scratch.exists()


GLOO = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
def never_comes():
    time.sleep(1000)
tensor = torch.ones(300, 4)
for _ in range(3):
    dist.all_reduce(tensor)
if dist.get_rank() == 2:
    print("up", flush=True)
    never_comes()
dist.all_reduce(tensor)
"""
HVD = """
import time, torch, horovod.torch as hvd
hvd.init()
def never_comes():
    time.sleep(1000)
for _ in range(3):
    hvd.allreduce(torch.ones(300, 4), name="first")
if hvd.rank() == 2:
    print("up", flush=True)
    never_comes()
hvd.allreduce(torch.ones(300, 4), name="gradient")
"""
MPI = GLOO.replace('"gloo"', '"mpi"')


@pytest.mark.promise("names-collective-ranks-wait-rank")
@pytest.mark.parametrize(
    ("script", "backend", "collective"),
    [
        (GLOO, "gloo", "all_reduce 4 ([300, 4] float, 4.8 kB)"),
        (HVD, "gloo", "allreduce 'gradient' ([300, 4] float32, 4.8 kB)"),
        (MPI, "mpi", "all_reduce SUM 4 (1200 of float32)"),
    ],
    ids=["gloo", "hvd", "mpi"],
)
def test_rank_missing_from_a_collective_is_named(
    lab: Lab, script: str, backend: str, collective: str, request: pytest.FixtureRequest, torch_at_hand: None
) -> None:
    if backend == "mpi":
        request.getfixturevalue("any_mpirun")
    run = lab.submit(script, process_count_per_node=3, distributed_backend=backend)
    expected = f"Rank 2 has not come to {collective}, for which ranks 0 and 1 have been waiting for "
    said: list[str] = []

    # Repeat until the message appears: the other ranks may already wait in the next collective while rank 2 still
    # leaves the previous one.
    def is_told() -> bool:
        if run.status in states.TERMINAL:
            raise AssertionError(run.record().failure)
        if run.status == states.RUNNING:
            said[:] = run.stacks().waiting
        return bool(said) and said[0].startswith(expected) and said[0].endswith("It is in train.py:5, `never_comes`.")

    try:
        wait_until(is_told, "both wait", 180)
    except AssertionError:
        raise AssertionError(said) from None
    run.cancel()
    wait_for_end(run)
