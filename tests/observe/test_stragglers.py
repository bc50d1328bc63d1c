"""Slow ranks by the counts of all ranks: they are named only if it is certain."""

from __future__ import annotations

import random

import pytest

from paceline.observe.stragglers import Counted, RunPace, lines, pace_of, straggler_of

NODES = {0: "node1", 1: "node1", 2: "node2", 3: "node2"}


def windows(own, *, count=12, step_s=0.4, data=None, noise=0.0, seed=1, window_s=5.0):
    """Windows of a training in step. own: rank -> its own seconds for a step; fast ranks wait for the slowest."""
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        mine = {rank: seconds * (1 + noise * drawn.uniform(-1, 1)) for rank, seconds in own.items()}
        longest = max(*mine.values(), step_s)
        steps = round(window_s / longest)
        found.append(
            {
                rank: Counted(
                    window_s, steps, window_s * (data or {}).get(rank, 0.0), window_s * (1 - seconds / longest)
                )
                for rank, seconds in mine.items()
            }
        )
    return found


@pytest.mark.promise("rank-holds-up-others-named")
def test_the_rank_that_holds_up_the_others_is_named():
    found = pace_of(windows({0: 0.24, 1: 0.24, 2: 0.25, 3: 0.43}, step_s=0), NODES)
    slow = found.straggler
    assert (slow.ranks, slow.node, slow.why) == ((3,), "node2", "compute")
    assert slow.factor == pytest.approx(1.8, abs=0.1)
    assert slow.text() == (
        "Rank 3 on node2 is 1.8 times as slow as the others: it takes 0.42 s a step of its own, where they take 0.23 s and "
        "then wait."
    )
    assert found.ranks[0].others == pytest.approx(0.44, abs=0.01)
    assert "Rank 3: 0.42 s a step: 100 % computing, 0 % waiting for data, 0 % waiting for others" in lines(found)
    assert RunPace.from_json(found.to_json()) == found
    assert "was 1.8 times as slow" in lines(RunPace.from_json(found.to_json(), is_over=True))[-1]


def test_slow_ranks_of_a_node_are_named_together():
    slow = straggler_of(windows({0: 0.2, 1: 0.2, 2: 0.4, 3: 0.38}, step_s=0), NODES)
    assert (slow.ranks, slow.node) == ((2, 3), "node2")
    assert slow.text().startswith("Ranks 2 and 3 on node2 are 1.9")
    alone = straggler_of(windows({0: 0.2, 1: 0.4}, step_s=0), {0: "a", 1: "a"})
    assert alone.text().startswith("Rank 1 is 2.0 times as slow as the others: it takes")


def test_straggler_report_names_waiting_for_data_as_the_cause_if_the_slow_rank_waits_for_data():
    found = straggler_of(windows({0: 0.2, 1: 0.2, 2: 0.2, 3: 0.5}, step_s=0, data={3: 0.6}), NODES)
    assert (found.ranks, found.why) == ((3,), "data")
    assert found.text().endswith("Most of it is waiting for data.")


def test_rank_that_waits_for_data_is_found_as_straggler_if_no_rank_waits_in_a_collective():
    # As on GPUs, no rank waits in a collective. Rank 3 waits for data for 45 % of its time.
    found = [{rank: Counted(5.0, 20, 5.0 * (0.45 if rank == 3 else 0.02), 0.0) for rank in NODES} for _ in range(8)]
    slow = straggler_of(found, NODES)
    assert (slow.ranks, slow.why) == ((3,), "data")
    assert slow.factor == pytest.approx(1.75, abs=0.05)


@pytest.mark.promise("checkpoint-noise-slow-network-ranks")
@pytest.mark.parametrize(
    "found",
    [
        windows({0: 0.2, 1: 0.21, 2: 0.2, 3: 0.2}, noise=0.05, step_s=0),
        # All ranks wait equally long, so the network is slow, and not a single rank.
        windows(dict.fromkeys(NODES, 0.2), step_s=0.5),
        windows({0: 0.2, 1: 0.2, 2: 0.2, 3: 0.4}, count=5, step_s=0),
        # A different rank is slow each time, as on a shared machine.
        [
            window
            for number in range(12)
            for window in windows({r: 0.5 if r == number % 4 else 0.2 for r in NODES}, count=1, step_s=0)
        ],
        # Rank 0 is slow only in every fourth window, as if it wrote a checkpoint.
        [
            w
            for n in range(12)
            for w in windows({**dict.fromkeys(NODES, 0.2), 0: 0.6 if n % 4 == 0 else 0.2}, count=1, step_s=0)
        ],
        windows({0: 0.2}, step_s=0),
        # Ranks with different numbers of steps do not wait for each other, so no rank is a straggler.
        [{rank: Counted(5.0, 10 + 5 * rank, 0.0, 0.0) for rank in NODES} for _ in range(12)],
        # Either one rank is fast or three ranks are slow. That can't be decided, so no rank is named.
        windows({0: 0.2, 1: 0.4, 2: 0.4, 3: 0.4}, step_s=0),
        [],
    ],
    ids=["even", "network", "short", "in turn", "checkpoints", "alone", "apart", "most are slow", "nothing"],
)
def test_ranks_of_equal_speed_have_no_straggler(found):
    assert straggler_of(found, NODES) is None
    assert pace_of(found, NODES).straggler is None


@pytest.mark.promise("checkpoint-noise-slow-network-ranks")
def test_intervals_without_a_training_step_are_ignored():
    # While rank 0 evaluates, the others wait for it.
    evaluates = [{rank: Counted(5.0, 0, 0.0, 0.0 if rank == 0 else 5.0) for rank in NODES}] * 20
    found = pace_of([*windows(dict.fromkeys(NODES, 0.4)), *evaluates], NODES)
    assert found.straggler is None
    assert found.seconds == 60.0
    assert found.ranks[1].others == 0.0
    assert pace_of(evaluates, NODES).ranks == {}


def test_straggler_is_reported_at_the_end_of_a_long_run_but_not_of_a_short_run():
    own = {0: 0.24, 1: 0.24, 2: 0.24, 3: 0.43}
    short = RunPace.from_json(pace_of(windows(own, step_s=0, count=8), NODES).to_json(), is_over=True)
    assert short.straggler is not None
    assert short.end_text is None
    told = RunPace.from_json(pace_of(windows(own, step_s=0, count=200), NODES).to_json(), is_over=True).end_text
    assert told.endswith("and then waited. That took 7 min in all.")
    assert pace_of(windows(dict.fromkeys(NODES, 0.4), count=200), NODES).end_text is None
