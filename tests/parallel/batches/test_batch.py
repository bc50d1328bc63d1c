from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.errors import ParallelError
from tests.late import late

torch = late("torch")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global Parts, default_split, own_rows, piece_sizes
    from paceline.parallel.batches.batch import Parts, default_split, own_rows, piece_sizes


COUNTS = st.integers(1, 8)


@given(rows=st.integers(1, 60), microbatches=COUNTS, replicas=COUNTS)
def test_each_row_of_a_batch_belongs_to_exactly_one_replica_and_microbatch(
    rows: int, microbatches: int, replicas: int
) -> None:
    every = [
        row for replica in range(replicas) for span in own_rows(rows, microbatches, replicas, replica) for row in span
    ]
    assert sorted(every) == list(range(rows))


@given(rows=st.integers(1, 60), microbatches=COUNTS, replicas=COUNTS)
def test_each_microbatch_has_the_same_rows_for_any_number_of_replicas(
    rows: int, microbatches: int, replicas: int
) -> None:
    alone = own_rows(rows, microbatches, 1, 0)
    for index in range(microbatches):
        spans = [own_rows(rows, microbatches, replicas, replica)[index] for replica in range(replicas)]
        assert [row for span in spans for row in span] == list(alone[index])


@pytest.mark.promise("uneven-batches-cut-evenly-can")
@given(rows=st.integers(1, 60), microbatches=COUNTS, replicas=COUNTS)
def test_rows_are_divided_almost_equally_among_replicas(rows: int, microbatches: int, replicas: int) -> None:
    sizes = piece_sizes(rows, microbatches, replicas)
    totals = [sum(of_micro[replica] for of_micro in sizes) for replica in range(replicas)]
    assert max(totals) - min(totals) <= 1
    assert [sum(of_micro) for of_micro in sizes] == [len(part) for part in torch.zeros(rows).tensor_split(microbatches)]


def test_piece_sizes_returns_the_result_shown_in_its_docstring() -> None:
    assert piece_sizes(10, 2, 2) == [[3, 2], [2, 3]]


def test_a_batch_is_split_into_inputs_and_target() -> None:
    assert default_split((1, 2)) == Parts((1,), {}, 2)
    assert default_split([1, 2, 3]) == Parts((1, 2), {}, 3)
    assert default_split({"input_ids": 1, "mask": 2, "labels": 3}) == Parts((), {"input_ids": 1, "mask": 2}, 3)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (lambda: torch.zeros(3, 2), r"one tensor of shape \[3, 2\]"),
        (lambda: (torch.zeros(3),), "a tuple of 1"),
        (lambda: {"x": 1, "z": 2}, "'x', 'z', of which none"),
        (lambda: {"y": 1, "label": 2}, "label' and 'y' may be the target"),
        (lambda: "text", "a str"),
    ],
)
def test_unsplittable_batch_is_refused_with_a_hint_at_split(batch: Callable[[], Any], words: str) -> None:
    with pytest.raises(ParallelError, match=words) as refused:
        default_split(batch())
    assert "split=" in str(refused.value)


def test_batch_without_a_loss_weight_is_split_without_extra_copies_of_targets() -> None:
    from paceline.parallel.batches.microbatches import cut
    from paceline.parallel.mesh import build, start
    from paceline.parallel.strategy import Layout
    from paceline.parallel.task import Task

    made = 0

    @dataclass
    class Target:
        of_row: Any

        def __post_init__(self) -> None:
            nonlocal made
            made += 1

    def count(loss_weight: Callable[[Any], float] | None) -> int:
        nonlocal made
        task = Task(
            model=torch.nn.Linear(2, 2),
            loss=lambda output, target: output.mean(),
            loss_weight=loss_weight,
            split=default_split,
            microbatches=2,
            precision=None,
            seed=0,
        )
        batch = torch.zeros(4, 2), Target(torch.zeros(4))
        made = 0
        cut(batch, task, build(start(), Layout()))
        return made

    # With a loss weight, each of the two microbatches creates one more `Target`.
    assert count(lambda target: 1.0) == count(None) + 2
