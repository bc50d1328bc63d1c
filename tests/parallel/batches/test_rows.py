from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from paceline.parallel.errors import ParallelError
from tests.late import late

if TYPE_CHECKING:
    from torch import Tensor

torch = late("torch")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global Parts, Whole, Rows, join_rows, move, unwrap
    from paceline.parallel.batches.batch import Parts, Whole
    from paceline.parallel.batches.rows import Rows, join_rows, move, unwrap


def test_batch_tensors_with_different_row_counts_are_named_in_the_error() -> None:
    with pytest.raises(ParallelError, match=r"args\[0\] of the batch has 4 rows, but target has shape \[3\]"):
        Rows(Parts((torch.zeros(4, 2),), {}, torch.zeros(3)))
    with pytest.raises(ParallelError, match=r"kwargs\['mask'\] has shape \[7, 7\].*Whole"):
        Rows(Parts((torch.zeros(4, 2),), {"mask": torch.zeros(7, 7)}, torch.zeros(4)))
    with pytest.raises(ParallelError, match="no tensor"):
        Rows(Parts((3,), {}, torch.tensor(1.0)))
    with pytest.raises(ParallelError, match="no rows"):
        Rows(Parts((torch.zeros(0, 2),), {}, torch.zeros(0)))


Pair = namedtuple("Pair", "left right")


@dataclass
class Inputs:
    ids: Tensor
    names: list[str]
    scale: float


def test_batch_rows_are_split_and_joined_inside_every_container_type() -> None:
    value = {
        "pair": Pair(torch.arange(4), [torch.arange(8).view(4, 2)]),
        "inputs": Inputs(torch.arange(4), list("abcd"), 0.5),
        "whole": Whole(torch.zeros(4, 4)),
        "number": torch.tensor(3.0),
        "none": None,
    }
    rows = Rows(value)
    taken = rows.take(1, 3)
    assert taken["pair"].left.tolist() == [1, 2]
    assert taken["pair"].right[0].tolist() == [[2, 3], [4, 5]]
    assert taken["inputs"].names == ["b", "c"]
    assert taken["inputs"].scale == 0.5
    assert taken["number"] is value["number"]
    assert taken["none"] is None
    assert unwrap(taken)["whole"].shape == (4, 4)
    joined = join_rows([rows.take(0, 1), rows.take(1, 4)])
    assert joined["pair"].right[0].tolist() == value["pair"].right[0].tolist()
    assert joined["inputs"].names == list("abcd")


def test_list_with_a_length_other_than_the_batch_size_is_not_split() -> None:
    value = Parts((torch.arange(4),), {"columns": ["a", "b", "c"]}, list("wxyz"))
    rows = Rows(value)
    pieces = [rows.take(0, 1), rows.take(1, 4)]
    assert [piece.kwargs["columns"] for piece in pieces] == [["a", "b", "c"]] * 2
    assert [piece.target for piece in pieces] == [["w"], ["x", "y", "z"]]
    joined = join_rows(pieces)
    assert joined.kwargs["columns"] == ["a", "b", "c"]
    assert joined.target == list("wxyz")
    assert joined.args[0].tolist() == [0, 1, 2, 3]


def test_joined_batch_rows_are_in_containers_of_the_same_classes_as_the_batch() -> None:
    value = OrderedDict(x=torch.arange(4), y=defaultdict(list, z=torch.zeros(4)))
    rows = Rows(value)
    joined = join_rows([rows.take(0, 2), rows.take(2, 4)])
    assert type(joined) is OrderedDict
    assert joined["y"].default_factory is list
    assert joined["x"].tolist() == [0, 1, 2, 3]


def test_values_wrapped_in_the_class_whole_move_to_the_device_but_are_not_split_into_rows() -> None:
    value = Parts((torch.zeros(2, 3), Whole({"mask": torch.ones(5)})), {}, torch.zeros(2))
    there = unwrap(move(Rows(value).take(0, 1), torch.device("meta")))
    assert there.args[1]["mask"].shape == (5,)
    assert there.args[1]["mask"].is_meta
