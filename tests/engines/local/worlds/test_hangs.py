"""Runs that hang in every known way, and long ones that do not, each on this machine with a limit of seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import paceline as pl
from paceline.runs import states
from paceline.runs.record import parse_utc
from paceline.system import processes
from tests.engines.lab import Lab, wait_for_end, wait_for_status
from tests.helpers import wait_until

pytestmark = pytest.mark.usefixtures("torch_at_hand")

#: In this script, two workers connect over Gloo. `{what}` stands for the code that they run then.
MET = """
import os, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, tensor = dist.get_rank(), torch.ones(300, 4)
dist.all_reduce(tensor)
print("up", flush=True)
def meet():
    dist.all_reduce(tensor)
{what}
"""
#: Seconds without progress that count as a hang. With a shorter limit, a busy machine would look like a hang.
LIMIT_S = 3.0
#: A shorter limit for workers that do make progress. Paceline still takes its two stack dumps one second apart.
HEALTHY_LIMIT_S = 1.0

STOPPED = "import signal; os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else None\nmeet()"
LOADER = """
lock = threading.Lock()
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        with lock:
            return torch.ones(3)
def load():
    if rank == 1:
        lock.acquire()  # as another thread of this process would have it at the moment of the fork
    for batch in torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork"):
        meet()
load()
"""
BARRIER = "def evaluate():\n    dist.barrier()\nif rank == 0:\n    evaluate()\nmeet()"
BATCHES = "for step in range(3 if rank else 4):\n    meet()\ndef rest():\n    time.sleep(1000)\nif rank:\n    rest()"
LEFT = "if rank == 1:\n    sys.exit(0)\ndist.new_group([0, 1])"
PIPE = """
import subprocess
def export():
    child = subprocess.Popen([sys.executable, "-c", "print('x' * 10**6)"], stdout=subprocess.PIPE)
    child.wait()
if rank == 1:
    export()
meet()
"""
#: In this code, a child process opens a FIFO that no process writes to, as if a file server did not answer. The child
#: waits in the kernel, where no signal handler runs.
FILES = """
def read_file():
    os.mkfifo("data")
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, "data", os.O_RDONLY, 0)])
if rank == 1:
    read_file()
meet()
"""
ORDER = "meet() if rank else dist.broadcast(tensor, 0)\ndist.broadcast(tensor, 0) if rank else meet()\ndist.barrier()"
NEVER = "def never_comes():\n    time.sleep(1000)\nif rank == 0:\n    never_comes()\nmeet()"
LOCKS = """
first, second = threading.Lock(), threading.Lock()
def other():
    with second:
        time.sleep(0.2)
        first.acquire()
def save():
    threading.Thread(target=other, daemon=True).start()
    with first:
        time.sleep(0.2)
        second.acquire()
if rank == 1:
    save()
meet()
"""
SOCKET = """
import socket
server = socket.create_server(("127.0.0.1", 0))
def download():
    socket.create_connection(server.getsockname()).recv(1)
if rank == 1:
    download()
meet()
"""
GROUPS = """
groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
def exchange():
    for group in groups if rank else groups[::-1]:
        dist.all_reduce(tensor, group=group)
exchange()
"""
ONE = "Rank 1 has not come to all_reduce 2 ([300, 4] float, 4.8 kB), for which rank 0 has been waiting for "
HANGS = {
    "sigstop": (STOPPED, [ONE, "It is stopped, by SIGSTOP or Ctrl-Z"]),
    "data loader": (LOADER, [ONE, "`load` (in ", "its data loader's process", "`__getitem__`"]),
    "forgotten barrier": (BARRIER, ["barrier 2", "all_reduce 2 ", "in another order", "`evaluate`"]),
    "batches": (BATCHES, ["Rank 1 has not come to all_reduce 5 ", "`rest`"]),
    "left with 0": (
        LEFT,
        ["Rank 1 has not come to new_group 1, for which rank 0 has", "It has ended with exit code 0."],
    ),
    "full pipe": (PIPE, [ONE, "waits for room in a full pipe, which the worker does not read", "`export`"]),
    "dead file server": (FILES, [ONE, "It waits in the kernel ("]),
    "another order": (ORDER, ["broadcast 2", "all_reduce 2 ", "in another order"]),
    "never comes": (NEVER, ["Rank 0 has not come to all_reduce 2 ", "for which rank 1 has", "`never_comes`."]),
    "locks": (LOCKS, [ONE, "`save`."]),
    "silent server": (SOCKET, [ONE, "`download`."]),
    "groups": (GROUPS, ["all_reduce 1 ", "waits in all_reduce 1 ", "itself, ", "`exchange`"]),
}

#: This code uses a third of a core: several times more than the least CPU use that Paceline counts as progress.
COMPUTES = """
import time
while True:
    end = time.thread_time() + 0.03
    while time.thread_time() < end: pass
    time.sleep(0.06)
"""
COMPILE = f"""
import subprocess
if rank == 1:
    subprocess.run([sys.executable, "-c", {COMPUTES!r}])
meet()
"""
CHECKPOINT = """
if rank == 0:
    with open("checkpoint", "wb", buffering=0) as file:
        while True:
            file.write(bytes(100_000))
            file.seek(0)
            time.sleep(0.05)
dist.barrier()
"""
EVALUATION = "if rank == 0:\n    while True:\n        sum(range(1000))\ndist.barrier()"
DEBUGGER = """
import bdb
class Debugger(bdb.Bdb):
    def user_line(self, frame):
        time.sleep(1000)
if rank == 0:
    Debugger().run("x = 1")
dist.barrier()
"""
LOADING = """
def read():
    with open("data", "wb+", buffering=0) as file:
        file.write(bytes(100_000))
        while True:
            os.pread(file.fileno(), 100_000, 0)
            time.sleep(0.3)
if rank == 0:
    read()
dist.barrier()
"""
NATIVE = """
torch.set_num_threads(1)
if rank == 0:
    while True:
        torch.mm(torch.ones(400, 400), torch.ones(400, 400)), time.sleep(0.02)
dist.barrier()
"""
HEALTHY = {
    "compile": COMPILE,
    "checkpoint": CHECKPOINT,
    "evaluation": EVALUATION,
    "debugger": DEBUGGER,
    "loading": LOADING,
    "native": NATIVE,
}


def submitted(lab: Lab, what: str, **values: object) -> pl.Run:
    pytest.importorskip("torch")
    given = {"process_count_per_node": 2, "distributed_backend": "gloo", "hang_seconds": LIMIT_S}
    return lab.submit(MET.replace("{what}", what), **{**given, **values})


def hang_of(run: pl.Run, *words: str) -> dict:
    """Return the hang that the run's record reports, once it has begun after both workers have met and names these `words`.

    On a busy machine, a worker that loads torch for long, or is stopped for a while, looks like a hang that then ends.
    """

    def hangs() -> bool:
        record = run.record()
        assert not record.is_terminal, record.failure
        logs = [run.folder.live_log(rank) for rank in range(2)]
        if not record.hang or not all(path.exists() and "up" in path.read_text() for path in logs):
            return False
        # Check that the hang was noticed after the last output, because an earlier hang may have been only a slow start.
        is_later = parse_utc(record.hang["since_utc"]).timestamp() >= max(path.stat().st_mtime for path in logs)
        return is_later and all(word in record.hang["text"] for word in words)

    try:
        wait_until(hangs, "the run hangs", 80)
    except AssertionError as error:
        raise AssertionError(f"{error}: {run.record().hang}") from None
    return dict(run.record().hang or {})


@pytest.mark.promise("run-hangs-noticed-rank-collective")
@pytest.mark.parametrize("name", HANGS)
def test_hang_report_names_the_cause_of_each_kind_of_hang(lab: Lab, name: str) -> None:
    what, words = HANGS[name]
    run = submitted(lab, what)
    try:
        found = hang_of(run, *words)
        report = (run.folder.path / found["report"]).read_text()
        assert found["text"] in report
        assert json.loads((run.folder.path / found["report"]).with_suffix(".json").read_text())["ranks"].keys() == {
            "0",
            "1",
        }
    finally:
        _end(run)


# Two of these scripts compute in the worker, so `make test` leaves out "evaluation". In the other one, only CPU time
# shows progress.
@pytest.mark.promise("compile-checkpoint-evaluation-one-rank")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.proof if name == "evaluation" else ()) for name in HEALTHY]
)
def test_long_healthy_run_is_not_reported_as_hanging(lab: Lab, name: str) -> None:
    run = submitted(lab, HEALTHY[name], hang_seconds=HEALTHY_LIMIT_S)
    wait_until(
        lambda: "up" in run.folder.live_log(0).read_text() if run.folder.live_log(0).exists() else False,
        "both have met",
        100,
    )
    try:
        # Wait for several stack dumps without output. Repeat this if a busy machine has stopped a worker for too long.
        for _ in range(3):
            up = time.monotonic()
            while time.monotonic() - up < 6 * HEALTHY_LIMIT_S:
                time.sleep(0.2)
            assert run.status == states.RUNNING
            if (hang := run.record().hang) is None:
                break
        assert hang is None, hang
    finally:
        _end(run)


def _end(run: pl.Run) -> None:
    """End it by force: a process that waits in the kernel reacts to nothing else, and its grace is not tested here."""
    for pid in (found.get("pid") for found in _ranks(run)):
        if pid:
            for one in [*processes.descendants(pid), pid]:
                processes.send(one, signal.SIGKILL)
    run.cancel()
    wait_for_end(run)


def _ranks(run: pl.Run) -> list[dict]:
    path = run.folder.hang_report(1).with_suffix(".json")
    return list(json.loads(path.read_text())["ranks"].values()) if path.exists() else []


def test_hang_is_shown_by_paceline_status_and_list_and_the_run_restarts_if_on_hang_is_restart(lab: Lab) -> None:
    run = submitted(lab, NEVER)
    found = hang_of(run, "Rank 0 has not come to all_reduce 2 ")
    environment = {**os.environ, "PACELINE_WORKSPACE": str(lab.workspace_dir)}

    def say(*words: str) -> str:
        command = [sys.executable, "-m", "paceline", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=120).stdout

    since = found["since_utc"][:19].replace("T", " ")
    assert f"Running, hangs since {since} UTC" in say("status", run.id)
    assert f"Running, hangs since {since} UTC" in say("list")
    assert found["text"] in say("status", run.id)
    assert json.loads(say("status", run.id, "--json"))["hang"]["text"] == found["text"]
    assert f"hangs: nothing has come since {found['since_utc']}" in run.folder.driver_log.read_text()
    run.cancel()
    wait_for_end(run)
    # With on_hang="restart", the script starts a second time after its hang, hangs again, and the run fails.
    run = submitted(lab, NEVER, on_hang="restart", max_restarts=1, hang_seconds=12)
    assert wait_for_end(run) == states.FAILED
    record = run.record()
    assert [attempt.cause for attempt in record.attempts] == ["hang", "hang"]
    assert record.failure is not None
    assert record.failure.cause == "hang"
    assert "Rank 0 has not come to" in record.failure.message


@pytest.mark.promise("time-limit-s-report-says")
def test_time_limit_report_names_the_collective_and_line_of_each_blocked_rank(lab: Lab) -> None:
    run = submitted(lab, NEVER, max_run_duration_seconds=40, hang_seconds=0)
    wait_for_status(run, states.RUNNING)
    assert wait_for_end(run) == states.FAILED
    record = run.record()
    assert record.failure is not None
    assert record.failure.cause == "time_limit"
    assert (
        "At its end: Rank 0 has not come to all_reduce 2 ([300, 4] float, 4.8 kB), for which rank 1 has been"
        in record.failure.message
    )
    assert "`never_comes`." in record.failure.message
    assert record.hang is None
