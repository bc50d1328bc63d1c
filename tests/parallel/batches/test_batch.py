from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.errors import ParallelError
from tests.late import late

if TYPE_CHECKING:
    from torch import Tensor

torch = late("torch")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """What loads torch is imported before the first test: collecting the tests loads none."""
    global Parts, Whole, count_rows, default_split, own_rows, piece_sizes, take_rows, unwrap, join_rows
    from paceline.parallel.batches.batch import (
        Parts,
        Whole,
        count_rows,
        default_split,
        own_rows,
        piece_sizes,
        take_rows,
        unwrap,
    )
    from paceline.parallel.batches.join import join_rows


COUNTS = st.integers(1, 8)


@given(rows=st.integers(1, 60), microbatches=COUNTS, replicas=COUNTS)
def test_every_row_is_computed_once(rows: int, microbatches: int, replicas: int) -> None:
    every = [
        row for replica in range(replicas) for span in own_rows(rows, microbatches, replicas, replica) for row in span
    ]
    assert sorted(every) == list(range(rows))


@given(rows=st.integers(1, 60), microbatches=COUNTS, replicas=COUNTS)
def test_a_microbatch_has_the_same_rows_with_any_number_of_replicas(
    rows: int, microbatches: int, replicas: int
) -> None:
    alone = own_rows(rows, microbatches, 1, 0)
    for index in range(microbatches):
        spans = [own_rows(rows, microbatches, replicas, replica)[index] for replica in range(replicas)]
        assert [row for span in spans for row in span] == list(alone[index])


@given(rows=st.integers(1, 60), microbatches=COUNTS, replicas=COUNTS)
def test_the_work_is_as_even_as_can_be(rows: int, microbatches: int, replicas: int) -> None:
    sizes = piece_sizes(rows, microbatches, replicas)
    totals = [sum(of_micro[replica] for of_micro in sizes) for replica in range(replicas)]
    assert max(totals) - min(totals) <= 1
    assert [sum(of_micro) for of_micro in sizes] == [len(part) for part in torch.zeros(rows).tensor_split(microbatches)]


def test_the_picture_in_the_docstring() -> None:
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
def test_a_batch_of_another_form_asks_for_split(batch: Callable[[], Any], words: str) -> None:
    with pytest.raises(ParallelError, match=words) as refused:
        default_split(batch())
    assert "split=" in str(refused.value)


def test_rows_that_disagree_are_named() -> None:
    with pytest.raises(ParallelError, match=r"args\[0\] of the batch has 4 rows, but target has shape \[3\]"):
        count_rows(Parts((torch.zeros(4, 2),), {}, torch.zeros(3)))
    with pytest.raises(ParallelError, match=r"kwargs\['mask'\] has shape \[7, 7\].*Whole"):
        count_rows(Parts((torch.zeros(4, 2),), {"mask": torch.zeros(7, 7)}, torch.zeros(4)))
    with pytest.raises(ParallelError, match="no tensor"):
        count_rows(Parts((3,), {}, torch.tensor(1.0)))
    with pytest.raises(ParallelError, match="no rows"):
        count_rows(Parts((torch.zeros(0, 2),), {}, torch.zeros(0)))


Pair = namedtuple("Pair", "left right")


@dataclass
class Inputs:
    ids: Tensor
    names: list[str]
    scale: float


def test_rows_are_taken_from_every_container_and_joined_again() -> None:
    value = {
        "pair": Pair(torch.arange(4), [torch.arange(8).view(4, 2)]),
        "inputs": Inputs(torch.arange(4), list("abcd"), 0.5),
        "whole": Whole(torch.zeros(4, 4)),
        "number": torch.tensor(3.0),
        "none": None,
    }
    taken = take_rows(value, 1, 3, 4)
    assert taken["pair"].left.tolist() == [1, 2]
    assert taken["pair"].right[0].tolist() == [[2, 3], [4, 5]]
    assert taken["inputs"].names == ["b", "c"]
    assert taken["inputs"].scale == 0.5
    assert taken["number"] is value["number"]
    assert taken["none"] is None
    assert unwrap(taken)["whole"].shape == (4, 4)
    joined = join_rows([take_rows(value, 0, 1, 4), take_rows(value, 1, 4, 4)])
    assert joined["pair"].right[0].tolist() == value["pair"].right[0].tolist()  # type: ignore[attr-defined]
    assert joined["inputs"].names == list("abcd")
