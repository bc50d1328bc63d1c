"""Runs that restart after the loss of a worker, and the records of each attempt."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest

from paceline.runs import states
from paceline.runs.follow import Show
from paceline.runs.logs import LogLine
from paceline.targets.local_leases import leases_dir
from tests.engines.lab import Lab, exit_codes, log_text, wait_for_end, wait_for_file

KILLED_ONCE = """
import os, signal, time
attempt, rank = os.environ["PACELINE_ATTEMPT"], os.environ["PACELINE_RANK"]
assert os.environ.get("TORCHELASTIC_RESTART_COUNT") in (None, str(int(attempt) - 1))
print(f"attempt {attempt} of rank {rank}")
saved = os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], f"saved_{rank}")
if attempt == "1":
    open(saved, "w").write("step 10")
    while len(os.listdir(os.environ["PACELINE_CHECKPOINT_DIR"])) < int(os.environ["PACELINE_WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
print("resumed from", open(saved).read())
"""


@pytest.mark.promise("run-starts-over-after-lost")
def test_run_with_a_killed_worker_is_restarted_and_completes(lab: Lab, way: dict[str, Any]) -> None:
    run = lab.submit(KILLED_ONCE, max_restarts=1, **way)
    lines: list[LogLine] = []
    # Follow the run to its end, as `paceline logs -f` does, and collect the printed lines.
    Show(run.folder, line=lines.append, state=lambda record: None).to_the_end()

    assert run.status == states.COMPLETED
    ranks = range(len(way) or 1)
    first, second = run.record().attempts
    assert (first.number, first.cause, dict(first.exit_codes)["0"]) == (1, "killed", 137)
    assert (second.number, second.cause, set(second.exit_codes.values())) == (2, None, {0})
    assert first.ended_utc is not None
    assert first.ended_utc <= second.started_utc
    for rank in ranks:
        assert [(line.attempt, line.text) for line in lines if line.rank == rank] == [
            (1, f"attempt 1 of rank {rank}"),
            (2, f"attempt 2 of rank {rank}"),
            (2, "resumed from step 10"),
        ]
        assert run.folder.rank_log(1, rank).read_text() == f"attempt 1 of rank {rank}\n"
        assert log_text(run, rank) == f"attempt 2 of rank {rank}\nresumed from step 10\n"


def test_run_with_a_killed_mpirun_is_restarted(lab: Lab, mpirun: str) -> None:
    script = """
        import os, time
        if os.environ["PACELINE_ATTEMPT"] == "1":
            open(f"outputs/pid_{os.environ['PACELINE_RANK']}", "w").write(str(os.getpid()))
            time.sleep(600)
    """
    run = lab.submit(script, max_restarts=1, process_count_per_node=2, distributed_backend="mpi")
    for rank in range(2):
        wait_for_file(run.folder.outputs / f"pid_{rank}")
    (launcher,) = children_of(run.record().owner["pid"])
    os.kill(launcher, signal.SIGKILL)
    run.wait_for_completion()

    assert [attempt.cause for attempt in run.record().attempts] == ["launcher", None]
    assert exit_codes(run, 2) == {"0": 0, "1": 0}


@pytest.mark.promise("script-s-own-exception-tried")
@pytest.mark.parametrize("end", ["raise ValueError('wrong')", "import sys; sys.exit(3)"])
def test_script_error_is_not_restarted_by_default(lab: Lab, end: str) -> None:
    run = lab.finish("print('once')\n" + end, max_restarts=3)

    assert run.status == states.FAILED
    assert len(run.record().attempts) == 1
    assert log_text(run).startswith("once\n")


@pytest.mark.promise("script-s-own-exception-tried")
def test_exception_is_restarted_with_restart_on_exception(lab: Lab) -> None:
    script = """
        import os
        print(os.environ["PACELINE_CHECKPOINT_DIR"])
        if os.environ["PACELINE_ATTEMPT"] != "3":
            raise ValueError("wrong")
    """
    run = lab.complete(script, max_restarts=3, restart_on_exception=True)

    assert [attempt.cause for attempt in run.record().attempts] == ["exception", "exception", None]
    # Each attempt keeps its log, and all attempts use the same checkpoint folder.
    for attempt in (1, 2, 3):
        first, *_ = run.folder.rank_log(attempt, 0).read_text().splitlines()
        assert first == str(run.folder.checkpoints)


@pytest.mark.parametrize("script", ["def\n", "import os\nimport no_such_module\n", "import helper\n"])
def test_script_with_a_syntax_error_is_not_restarted(lab: Lab, script: str) -> None:
    run = lab.finish(script, {"helper.py": "if True:\npass\n"}, max_restarts=3, restart_on_exception=True)

    assert len(run.record().attempts) == 1
    assert run.failure is not None
    assert "It would come again with each attempt, so none follows." in run.failure.message


SERVER = """
import os, time
number = int(os.environ["PACELINE_ATTEMPT"])
with open(f"outputs/port_{number}", "w") as file:
    file.write(os.environ["MASTER_PORT"])
while number == 1 and not os.path.exists("outputs/taken"):
    time.sleep(0.01)
import socket
listener = socket.socket()
try:
    listener.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
except OSError as error:
    # As torch says it; a plain OSError names no port, and is understood as well.
    if os.path.exists("outputs/plain"):
        raise
    raise RuntimeError(f"failed to listen. port: {os.environ['MASTER_PORT']}, name: EADDRINUSE, message: {error}")
"""


@pytest.mark.promise("port-another-program-took-named")
@pytest.mark.parametrize("is_plain", [False, True], ids=["as torch says it", "a plain OSError"])
def test_occupied_port_is_named_and_replaced_in_the_next_attempt(lab: Lab, is_plain: bool) -> None:
    run = lab.submit(SERVER, max_restarts=1, distributed_backend="gloo")
    if is_plain:
        (run.folder.outputs / "plain").touch()
    first = int(wait_for_file(run.folder.outputs / "port_1"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        (run.folder.outputs / "taken").touch()
        run.wait_for_completion()

    assert [attempt.cause for attempt in run.record().attempts] == ["port", None]
    assert int((run.folder.outputs / "port_2").read_text()) != first
    driver = run.folder.driver_log.read_text()
    assert f"port {first} (MASTER_PORT) was taken by pid {os.getpid()} (" in driver


def test_occupied_port_without_attempts_left_fails_the_run(lab: Lab) -> None:
    run = lab.submit(SERVER, distributed_backend="gloo")
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(wait_for_file(run.folder.outputs / "port_1"))))
        other.listen()
        (run.folder.outputs / "taken").touch()
        wait_for_end(run)

    assert run.failure is not None
    assert (run.failure.cause, run.failure.exit_code, run.failure.rank) == ("port", 1, 0)
    assert list((leases_dir() / "tickets").glob("*.ticket")) == []


@pytest.mark.promise("run-starts-over-after-lost")
def test_restarts_end_at_max_restarts(lab: Lab) -> None:
    run = lab.finish("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n", max_restarts=2)

    assert run.status == states.FAILED
    assert [attempt.number for attempt in run.record().attempts] == [1, 2, 3]
    assert run.failure is not None
    assert (run.failure.attempt, run.failure.cause, run.failure.exit_code) == (3, "killed", 137)


TRAINING = """
import os, signal, paceline
run = paceline.Run.get_context()
saved = os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], "step")
start = int(open(saved).read()) if os.path.exists(saved) else 0
for step in range(start, 30):
    run.log("loss", 1 / (1 + step), step=step)
    if step % 10 == 9:
        run.log("accuracy", step / 30, step=step)
        open(saved + ".new", "w").write(str(step + 1))
        os.rename(saved + ".new", saved)
    if (os.environ["PACELINE_ATTEMPT"], step) in (("1", 14), ("2", 27)):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.promise("metrics-several-attempts-one-series")
def test_metrics_of_a_run_with_three_attempts_equal_those_of_an_uninterrupted_one(lab: Lab) -> None:
    run = lab.complete(TRAINING, max_restarts=2)

    assert len(run.record().attempts) == 3
    assert run.get_metrics() == {
        "loss": [1 / (1 + step) for step in range(30)],
        "accuracy": [step / 30 for step in (9, 19, 29)],
    }


def test_metrics_logged_without_a_step_are_kept_from_all_attempts(lab: Lab) -> None:
    script = """
        import os, signal, paceline
        run = paceline.Run.get_context()
        run.log("loss", float(os.environ["PACELINE_ATTEMPT"]))
        if os.environ["PACELINE_ATTEMPT"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert lab.complete(script, max_restarts=1).get_metrics() == {"loss": [1.0, 2.0]}


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


REPEATS = """
import os, signal, time
import torch
import paceline as pl
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
last = 60 if os.environ["PACELINE_ATTEMPT"] == "1" else 100
for step in range(last):
    time.sleep(0.1)
    optimizer.step()
    pl.Run.get_context().log("loss", 0.5, step=step)
if last == 60 and os.environ["PACELINE_RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_goodput_reports_time_of_steps_repeated_after_a_restart_in_a_separate_category(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SAMPLE_SECONDS", "1")
    run = lab.submit(REPEATS, max_restarts=1, process_count_per_node=2, distributed_backend="gloo")
    run.wait_for_completion()

    assert [attempt.cause for attempt in run.record().attempts] == ["killed", None]
    found = run.goodput()
    assert sum(found.percent.values()) == pytest.approx(100, abs=0.5)
    # The second attempt repeats 60 steps. Each step sleeps for 0.1 s on two cores, which makes 12 core seconds.
    assert found.core_s["done again"] > 10
    assert found.core_s["computing"] > 0


FORKED = """
import os, signal, sys, time
import colorsys  # it stands for a library
attempt, run = os.environ["PACELINE_ATTEMPT"], os.environ["PACELINE_RUN_DIR"]
if attempt == "1":
    log, deadline = os.path.join(run, "logs", "driver.log"), time.monotonic() + float(os.environ["WAITS"])
    while "warm process is ready" not in open(log).read() and time.monotonic() < deadline:
        time.sleep(0.05)
    if os.environ["PACELINE_RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
print("forked" if "--spare" in open("/proc/self/cmdline").read() else "cold", sys.argv[1:])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="spares need Linux")
def test_second_attempt_is_forked_from_a_process_with_preloaded_imports(lab: Lab, way: dict[str, Any]) -> None:
    run = lab.submit(FORKED, arguments=["--x", "1"], max_restarts=1, environment_variables={"WAITS": "90"}, **way)
    wait_for_end(run)
    assert run.status == states.COMPLETED
    assert log_text(run, 0) == "forked ['--x', '1']\n"
    assert "cold" not in run.folder.driver_log.read_text()


KEPT = """
import os, signal, time
from paceline import checkpoint
from paceline.checkpoint import saving
rank, run = os.environ["PACELINE_RANK"], os.environ["PACELINE_RUN_DIR"]
state, start = {"values": []}, 0
if found := checkpoint.latest():
    found.load_into(state)
    start = found.step
print(start > 0 and state["values"] == list(range(start)), os.listdir(os.environ["PACELINE_CHECKPOINT_DIR"]))
log, left = os.path.join(run, "logs", "driver.log"), 20
while not start and left:
    state["values"].append(len(state["values"]))
    checkpoint.save(state, len(state["values"]), every=1_000_000)
    time.sleep(0.05)
    left -= "warm process is ready" in open(log).read() and (rank != "0" or bool(saving._neighbour._images))
if rank == "0" and not start:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="spares need Linux")
def test_killed_training_resumes_from_a_step_kept_in_memory(lab: Lab) -> None:
    run = lab.submit(KEPT, max_restarts=1, process_count_per_node=2, distributed_backend="gloo")
    wait_for_end(run)
    assert [attempt.cause for attempt in run.record().attempts] == ["killed", None]
    # Both ranks find the state of rank 0 in memory, and the disk has no checkpoint.
    assert [log_text(run, rank) for rank in (0, 1)] == ["True []\n"] * 2


def test_restarted_attempt_is_not_forked_if_warm_is_off(lab: Lab) -> None:
    run = lab.submit(FORKED, max_restarts=1, warm="off", environment_variables={"WAITS": "1"})
    wait_for_end(run)
    assert log_text(run, 0) == "cold []\n"
    assert "warm" not in run.folder.driver_log.read_text()
