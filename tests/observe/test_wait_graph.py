"""Sentences on ranks that wait for each other, from looks as plain values."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.observe import wait_graph
from paceline.observe.stacks import RunStacks

WORK = "/ws/runs/lab_1_2/work"


def entry(
    kind: str, number: int = 512, *, age: float = 310.0, channel: str = "torch 0", **values: Any
) -> dict[str, Any]:
    given = {
        "channel": channel,
        "kind": kind,
        "name": "",
        "number": number,
        "shape": "",
        "bytes": 0,
        "ranks": "",
        "began": 1000 - age,
    }
    return {**given, **values}


def rank(*entries: dict[str, Any], at: str = "train.py:20 step", **values: Any) -> dict[str, Any]:
    place, function = at.split(" ")
    file, line = place.split(":")
    frames = [{"file": file if file.startswith("/") else f"{WORK}/{file}", "line": int(line), "function": function}]
    threads = [{"name": "main", "current": False, "frames": frames}]
    return {"pid": 7, "state": "S", "node": "n1", "threads": threads, "board": list(entries), **values}


def told(*ranks: dict[str, Any]) -> dict[str, Any]:
    found = {str(number): one for number, one in enumerate(ranks)}
    return {"time": 1000.0, "run_id": "lab_1_2", "work_dir": WORK, "ranks": found, "notes": []}


@pytest.mark.promise("names-collective-ranks-wait-rank")
def test_rank_missing_from_a_collective_is_named():
    waiting = entry("allreduce", shape="[1200, 250] float", bytes=1_200_000)
    look = told(rank(waiting), rank(waiting), rank(at="data.py:41 __getitem__"), rank(waiting))
    assert wait_graph.sentences(look) == [
        "Rank 2 has not come to allreduce 512 ([1200, 250] float, 1.2 MB), for which ranks 0, 1 and 3 "
        "have been waiting for 310 s. It is in data.py:41, `__getitem__`."
    ]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (rank(exit_code=0), "It has ended with exit code 0."),
        (
            rank(state="T"),
            "It is stopped, by SIGSTOP or Ctrl-Z in train.py:20, `step`; `kill -CONT 7` on n1 lets it go on.",
        ),
        (rank(tracer=99), "It is in a debugger (process 99) in train.py:20, `step`."),
        (
            rank(state="D", wchan="rpc_wait_bit_killable"),
            "It waits in the kernel (rpc_wait_bit_killable) for a file server that does",
        ),
        (
            rank(call="write to pipe:[1]", readers=[5]),
            "It waits for room in a full pipe, which process 5 does not read, in train.py",
        ),
        (
            rank(children=[rank(pid=8, command="/bin/cat", call="write to pipe:[1]", readers=[8])]),
            "Its process 8 (cat) waits for room in a full pipe, which nobody reads, in train.py:20",
        ),
        (
            rank(
                at="/x/site-packages/torch/utils/data/dataloader.py:1137 get",
                children=[rank(at="data.py:3 load", pid=8, command="p")],
            ),
            "It is in torch/utils/data/dataloader.py:1137, `get`; its data loader's process 8 is in data.py:3, `load`.",
        ),
        (
            {"silent": "it has not started, or is not a Python program"},
            "It gives no stack: it has not started, or is not a Python program.",
        ),
        (rank(entry("broadcast", 3, channel="torch 1", age=5)), "It waits in broadcast 3 itself, train.py:20, `step`."),
    ],
)
def test_wait_report_says_if_the_missing_rank_ended_or_stopped_or_at_which_code_line_it_is_blocked(missing, said):
    found = wait_graph.sentences(told(rank(entry("allreduce")), missing))
    assert said in found[0], found
    assert found[0].startswith("Rank 1 has not come to allreduce 512, for which rank 0 has been waiting for 310 s. ")


def test_wait_report_names_the_rank_that_calls_collectives_in_another_order_than_most_ranks():
    look = told(rank(entry("broadcast")), rank(entry("allreduce")), rank(entry("allreduce")))
    (said,) = wait_graph.sentences(look)
    assert said == (
        "Rank 0 is in broadcast 512, where ranks 1 and 2 are in allreduce 512 for 310 s: the ranks call their collectives in "
        "another order. Ranks 0 and 1: each is in train.py:20, `step`."
    )


def test_only_ranks_of_the_group_can_be_missing_from_its_collective():
    one = entry("barrier", 3, channel="torch 2", ranks="1-2")
    (said,) = wait_graph.sentences(told(rank(), rank(one), rank(), rank()))
    assert said.startswith("Rank 2 has not come to barrier 3 of the group of ranks 1 and 2, for which rank 1 has")


def test_rank_that_finished_a_collective_is_not_reported_as_missing():
    # With Gloo, the root of a broadcast is done as soon as it has sent its data.
    through = rank(torch={"entries": [], "last": {"0": 512}})
    (said,) = wait_graph.sentences(told(through, rank(entry("broadcast"))))
    assert said == "Rank 1 is in broadcast 512 for 310 s; all have come to it, and it does not end."


def test_wait_report_shows_the_name_of_an_allreduce_and_does_not_list_a_rank_in_join_as_missing():
    named = {"number": 0, "channel": "process set 0"}
    first = entry("allreduce", name="allreduce.grad.7", **named)
    look = told(rank(first), rank(entry("join", name="join", **named)), rank())
    assert wait_graph.sentences(look)[0].startswith(
        "Rank 2 has not come to allreduce 'grad.7', for which rank 0 has been"
    )


def test_rank_stopped_by_sigstop_is_named_in_the_wait_report():
    look = told(rank(state="T"), rank())
    assert [text[:42] for text in wait_graph.sentences(look)] == ["Rank 0: it is stopped, by SIGSTOP or Ctrl-"]
    assert wait_graph.sentences(told(rank(), rank())) == []


def test_ranks_with_equal_stacks_share_one_stack_in_the_printed_report():
    look = told(rank(), rank(at="data.py:41 load"), rank())
    look["notes"] = ["py-spy may not look into processes here"]
    assert str(RunStacks(look)) == (
        "Rank 1:\n  thread main\n    data.py:41 load\n\n"
        "Ranks 0 and 2:\n  thread main\n    train.py:20 step\n\n"
        "Note: py-spy may not look into processes here"
    )


def test_more_than_a_few_ranks_are_shown_as_a_count_and_a_range():
    assert wait_graph.ranks_words(range(20)) == "20 ranks (0 to 19)"


def test_printed_list_of_ranks_joins_consecutive_ranks_and_shows_at_most_eight_spans():
    assert wait_graph.ranks_text([0, 1, 2]) == "0, 1, 2"
    assert wait_graph.ranks_text([*range(32), 64, *range(96, 128)]) == "0 to 31, 64, 96 to 127"
    assert wait_graph.ranks_text(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more spans"
