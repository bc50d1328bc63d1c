"""Whether workers get on, from two looks as plain values."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from paceline.observe.wait_graph import gets_on, stuck_ranks

WORK = "/ws/runs/lab_1_2/work"


def process(pid: int = 7, line: int = 20, **values: Any) -> dict[str, Any]:
    library = {"file": "/lib/python3.11/threading.py", "line": 320, "function": "wait"}
    frames = [library, {"file": f"{WORK}/train.py", "line": line, "function": "step"}]
    given = {"pid": pid, "state": "S", "cpu_s": 10.0, "io_bytes": 1000, "threads": [{"name": "main", "frames": frames}]}
    return {**given, **values}


def look(time: float, *ranks: dict[str, Any]) -> dict[str, Any]:
    return {
        "time": time,
        "run_id": "lab_1_2",
        "work_dir": WORK,
        "ranks": {str(rank): one for rank, one in enumerate(ranks)},
    }


WAITS = {
    "channel": "torch 0",
    "kind": "all_reduce",
    "name": "",
    "number": 3,
    "shape": "",
    "bytes": 0,
    "ranks": "",
    "began": 5.0,
}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (process(), process(), None),
        # Progress of a child counts, for example of a data loader or a compiler.
        (process(children=[process(8)]), process(children=[process(8, cpu_s=12.0)]), "computes"),
        (process(), process(children=[process(9)]), "has started process 9"),
        (process(), process(cpu_s=10.6), "computes"),
        (process(), process(cpu_s=10.1), None),
        (process(), process(io_bytes=1_000_000), "reads or writes"),
        # The rank has only written the stacks that Paceline requested, which is no progress.
        (process(answer_bytes=900_000), process(io_bytes=1_000_000), None),
        (process(line=20), process(line=21), "has come to another place"),
        (
            process(children=[process(8)]),
            process(children=[process(8, line=3)]),
            "has a process 8 that has come to another place",
        ),
        # A rank may use a whole core while it waits in a collective, as with NCCL.
        (process(board=[WAITS]), process(board=[WAITS], cpu_s=20.0), None),
        (process(board=[WAITS]), process(board=[{**WAITS, "number": 4}], cpu_s=20.0), "computes"),
        (process(board=[WAITS], line=20), process(board=[WAITS], line=99), "has come to another place"),
        (process(), process(state="T", cpu_s=20.0), None),
        (process(), process(tracer=99), "is in a debugger (process 99)"),
        (process(), process(exit_code=0), None),
        (process(), {"silent": "its node has not told of it"}, "nothing is known of rank 1"),
    ],
)
def test_change_between_two_stack_dumps_tells_whether_a_rank_makes_progress(before, after, said):
    # Rank 0 makes no progress. Rank 1 is the process of this case.
    found = gets_on(look(100.0, process(), before), look(110.0, process(), after))
    assert found == (None if said is None else said if said.startswith("nothing") else f"rank 1 {said}")


def test_change_within_library_frames_is_not_reported_as_progress():
    after = process()
    other = copy.deepcopy(after)
    other["threads"][0]["frames"][0] = {"file": "/lib/python3.11/queue.py", "line": 1, "function": "get"}
    assert gets_on(look(1.0, other), look(11.0, after)) is None


BLOCKED = process(board=[{**WAITS, "ranks": "0-1"}])
LOST = {"silent": "its node has not told of it"}


@pytest.mark.parametrize(
    ("before", "after", "is_stuck"),
    [
        (BLOCKED, BLOCKED, True),
        (BLOCKED, {**BLOCKED, "cpu_s": 10.12}, True),
        # The rank handles SIGTERM, for example by saving its state, although a collective is open.
        (BLOCKED, {**BLOCKED, "cpu_s": 12.0}, False),
        (BLOCKED, process(line=99, board=BLOCKED["board"]), False),
        # The rank sleeps, or waits for a rank that still lives.
        (process(), process(), False),
        (process(board=[{**WAITS, "ranks": "0,2"}]), process(board=[{**WAITS, "ranks": "0,2"}]), False),
        (LOST, BLOCKED, False),
        # The rank has ended with an open collective, which its file still lists.
        (BLOCKED, {"board": BLOCKED["board"], "gone": True, "exit_code": 143}, False),
    ],
)
def test_rank_is_stuck_only_if_it_stands_still_in_a_collective_with_a_lost_rank(before, after, is_stuck):
    third = process(9)
    looks = look(100.0, before, LOST, third), look(101.0, after, LOST, third)
    stuck = stuck_ranks(*looks, [1])
    assert (0 in stuck) is is_stuck
    # Rank 2 does not wait.
    assert 2 not in stuck
