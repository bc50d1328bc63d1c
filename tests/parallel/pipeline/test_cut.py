"""The cuts are the best there are: compared with every other way to cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel import ParallelError
from paceline.parallel.pipeline.cut import STATE_FACTOR, Block, Plan, find_cuts, plan_by_hand

SECONDS = st.floats(0.001, 10.0, allow_nan=False)
COSTS = st.lists(SECONDS, min_size=4, max_size=12)


def blocks(costs: list[float], *, parameters: int = 0, activations: int = 0, live: int = 0) -> list[Block]:
    return [
        Block(
            name=f"blocks.{index}",
            forward_s=cost / 3,
            backward_s=2 * cost / 3,
            parameters=((f"p{index}", parameters),) if parameters else (),
            activation_bytes=activations,
            live_bytes=live,
        )
        for index, cost in enumerate(costs)
    ]


def best_by_trying(row: list[Block], stages: int, **options: object) -> Plan:
    """The fastest of all ways to cut."""
    given_options = {"schedule": "1f1b", "workers": stages, "microbatches": 1} | options
    return min(
        (plan_by_hand(row, starts, **given_options) for starts in combinations(range(1, len(row)), stages - 1)),  # type: ignore[arg-type]
        key=lambda plan: plan.slowest_s,
    )


@given(COSTS, st.integers(2, 4))
def test_chosen_stage_boundaries_minimize_the_time_of_the_slowest_stage(costs: list[float], stages: int) -> None:
    row = blocks(costs, live=100)
    found = find_cuts(row, stages)
    assert found.slowest_s == pytest.approx(best_by_trying(row, stages).slowest_s, rel=1e-12)
    ends = [0, *found.starts, len(row)]
    assert all(first < last for first, last in pairwise(ends))


@given(COSTS, st.integers(2, 4), st.integers(1, 8), st.lists(st.integers(0, 50), min_size=12, max_size=12))
def test_chosen_stage_boundaries_are_the_fastest_that_fit_into_memory(
    costs: list[float], stages: int, microbatches: int, sizes: list[int]
) -> None:
    row = [
        Block(
            name=str(index),
            forward_s=cost,
            backward_s=cost,
            parameters=((str(index), size),),
            activation_bytes=5 * size,
        )
        for index, (cost, size) in enumerate(zip(costs, sizes, strict=False))
    ]
    options = {"schedule": "1f1b", "workers": stages, "microbatches": microbatches}
    every = [plan_by_hand(row, starts, **options) for starts in combinations(range(1, len(row)), stages - 1)]  # type: ignore[arg-type]
    least = min(max(plan.memory_bytes) for plan in every)
    limit = int(1.2 * least)
    fitting = min(plan.slowest_s for plan in every if max(plan.memory_bytes) <= limit)
    found = find_cuts(row, stages, microbatches=microbatches, memory_bytes=limit)
    assert max(found.memory_bytes) <= limit
    assert found.slowest_s == pytest.approx(fitting, rel=1e-12)
    if least:
        with pytest.raises(ParallelError, match=f"fits; the best needs about {least} bytes"):
            find_cuts(row, stages, microbatches=microbatches, memory_bytes=least - 1)


def test_stage_boundaries_with_less_traffic_win_a_tie() -> None:
    row = blocks([1.0, 0.0, 1.0])
    row = [Block(**{**vars(block), "live_bytes": size}) for block, size in zip(row, (0, 9, 5), strict=True)]
    assert find_cuts(row, 2, bandwidth_bytes_s=1e30).starts == (2,)
    row = [Block(**{**vars(block), "live_bytes": size}) for block, size in zip(row, (0, 5, 9), strict=True)]
    assert find_cuts(row, 2, bandwidth_bytes_s=1e30).starts == (1,)


def test_layers_of_unequal_cost_are_divided_into_two_stages_of_almost_equal_time() -> None:
    # Linear layers of unequal width. With four layers in each stage, the slower one would take 1.66 times the mean.
    row = blocks([8.0, 1.0, 1.0, 2.0, 1.0, 4.0, 2.0, 3.0])
    plan = find_cuts(row, 2, bandwidth_bytes_s=1e30)
    assert plan.slowest_s / (sum(plan.costs_s) / 2) <= 1.1


def test_first_stage_gets_fewer_blocks_if_memory_is_short() -> None:
    row = blocks([1.0] * 8, activations=100)
    assert find_cuts(row, 2, microbatches=8).starts == (4,)
    plan = find_cuts(row, 2, microbatches=8, memory_bytes=600)
    assert plan.starts == (3,)
    assert plan.memory_bytes == (600, 500)
    # With GPipe, every stage keeps all microbatches.
    with pytest.raises(ParallelError, match="needs about 3200 bytes"):
        find_cuts(row, 2, microbatches=8, schedule="gpipe", memory_bytes=600)


def test_stage_memory_is_four_times_its_parameters_plus_kept_activations() -> None:
    row = blocks([1.0] * 4, parameters=10, activations=7)
    assert find_cuts(row, 2, microbatches=8).memory_bytes == (STATE_FACTOR * 20 + 2 * 14, STATE_FACTOR * 20 + 14)


def test_tied_parameter_is_counted_once_per_stage() -> None:
    row = [Block(name=str(index), forward_s=1, backward_s=1, parameters=(("tied", 10),)) for index in range(4)]
    assert find_cuts(row, 2).memory_bytes == (40, 40)


def test_tied_blocks_are_placed_in_one_stage_if_the_balance_allows() -> None:
    row = blocks([1.0, 1.0, 0.02, 1.0, 1.0])
    assert find_cuts(row, 2, tied=[frozenset({1, 2})]).starts == (3,)
    assert find_cuts(row, 2, tied=[frozenset({2, 3})]).starts == (2,)
    # Only a stage with all blocks could hold the embedding (0) and the head (4), so the tie does not change the cut.
    assert find_cuts(row, 2, tied=[frozenset({0, 4})]).starts in ((2,), (3,))


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ParallelError, match=r"2 blocks that it can be cut between \(blocks.0, blocks.1\).*3 stages"):
        find_cuts(blocks([1.0, 1.0]), 3)
