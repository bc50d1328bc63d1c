"""Runs that start over after a worker was lost, and what is kept of each attempt."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from paceline.runs import states
from paceline.runs.follow import Show
from paceline.runs.logs import Line
from tests.engines.lab import Lab, exit_codes, log_text, wait_for_file

KILLED_ONCE = """
import os, signal, time
attempt, rank = os.environ["PACELINE_ATTEMPT"], os.environ["RANK"]
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(int(attempt) - 1)
print(f"attempt {attempt} of rank {rank}")
saved = os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], f"saved_{rank}")
if attempt == "1":
    open(saved, "w").write("step 10")
    while len(os.listdir(os.environ["PACELINE_CHECKPOINT_DIR"])) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
print("resumed from", open(saved).read())
"""


def test_a_run_whose_worker_was_killed_starts_over_and_completes(lab: Lab, way: dict[str, Any]) -> None:
    run = lab.submit(KILLED_ONCE, max_restarts=1, **way)
    lines: list[Line] = []
    # What `paceline logs -f` shows of it, from before the first attempt to the end.
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


def test_a_killed_mpirun_starts_the_run_over(lab: Lab, mpirun: str) -> None:
    script = """
        import os, time
        if os.environ["PACELINE_ATTEMPT"] == "1":
            open(f"outputs/pid_{os.environ['RANK']}", "w").write(str(os.getpid()))
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


@pytest.mark.parametrize("end", ["raise ValueError('wrong')", "import sys; sys.exit(3)"])
def test_what_the_script_does_wrong_by_itself_is_not_tried_again(lab: Lab, end: str) -> None:
    run = lab.finish("print('once')\n" + end, max_restarts=3)

    assert run.status == states.FAILED
    assert len(run.record().attempts) == 1
    assert log_text(run).startswith("once\n")


def test_restarts_come_to_an_end(lab: Lab) -> None:
    run = lab.finish("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n", max_restarts=2)

    assert run.status == states.FAILED
    assert [attempt.number for attempt in run.record().attempts] == [1, 2, 3]
    assert run.failure is not None
    assert (run.failure.attempt, run.failure.cause, run.failure.exit_code) == (3, "killed", 137)


def test_metrics_of_all_attempts_are_kept(lab: Lab) -> None:
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
