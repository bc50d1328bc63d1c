from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.collectives import inline_reduce
from paceline.collectives.coordinator import Coordinator, Message
from paceline.collectives.request import ALLREDUCE, Request
from tests.late import late

numpy = late("numpy")
pytestmark = pytest.mark.skipif(find_spec("numpy") is None, reason="needs numpy")


def task(array: Any, op: str = "sum", dtype: str = "float32", prescale: float = 1.0, out: Any = None) -> Any:
    request = Request(ALLREDUCE, "t", (dtype,), (array.shape,), op, prescale)
    return SimpleNamespace(request=request, arrays=[array], outs=[out])


def test_what_two_ranks_send_along_comes_back_with_the_answer():
    coordinator = Coordinator(2, 8)
    tasks = [task(numpy.array([1, 2], numpy.float32), "average"), task(numpy.array([3, 6], numpy.float32), "average")]
    for rank, asked in enumerate(tasks):
        coordinator.receive(rank, Message(0, (), (asked.request,), payload=inline_reduce.payload(asked)))
    response = coordinator.respond()
    assert response is not None
    ((place, data),) = response.results
    assert place == 0
    assert inline_reduce.unpack(tasks[0], data, 2).tolist() == [2, 4]


def test_nothing_is_added_up_where_a_rank_has_sent_nothing_along():
    coordinator = Coordinator(2, 8)
    asked = task(numpy.ones(2, numpy.float32))
    coordinator.receive(0, Message(0, (), (asked.request,), payload=inline_reduce.payload(asked)))
    coordinator.receive(1, Message(0, (), (asked.request,)))
    response = coordinator.respond()
    assert response is not None
    assert not response.results
    # Nor is it kept for the next time.
    coordinator.receive(0, Message(0, (), (asked.request,)))
    coordinator.receive(1, Message(0, (), (asked.request,), payload=inline_reduce.payload(asked)))
    response = coordinator.respond()
    assert response is not None
    assert not response.results


def test_ranks_that_disagree_get_no_result():
    coordinator = Coordinator(2, 8)
    for rank, asked in enumerate((task(numpy.ones(2, numpy.float32)), task(numpy.ones(3, numpy.float32)))):
        coordinator.receive(rank, Message(0, (), (asked.request,), payload=inline_reduce.payload(asked)))
    response = coordinator.respond()
    assert response is not None
    assert response.agreements[0].error is not None
    assert not response.results


@pytest.mark.parametrize(
    ("op", "wanted"),
    [("sum", [True, True]), ("average", [True, False]), ("min", [True, False]), ("max", [True, True])],
)
def test_truth_values_are_joined_as_numpy_joins_them(op, wanted):
    asked = task(numpy.array([True, False]), op, "bool")
    data = inline_reduce.fold(asked.request, [b"\x01\x00", b"\x01\x01"])
    assert inline_reduce.unpack(asked, data, 2).tolist() == wanted


def test_half_precision_is_added_up_in_float32():
    asked = task(numpy.array([2048], numpy.float16), dtype="float16")
    one = inline_reduce.payload(task(numpy.array([1], numpy.float16), dtype="float16"))
    data = inline_reduce.fold(asked.request, [inline_reduce.payload(asked), one, one])
    assert inline_reduce.unpack(asked, data, 3).tolist() == [2050]


def test_large_arrays_and_groups_go_the_usual_way():
    assert inline_reduce.payload(task(numpy.ones(inline_reduce.LIMIT_BYTES // 4 + 1, numpy.float32))) is None
    assert inline_reduce.payload(task(numpy.ones(2, numpy.float32), "adasum")) is None
    grouped = task(numpy.ones(2, numpy.float32))
    grouped.request = grouped.request._replace(grouped=True)
    assert inline_reduce.payload(grouped) is None
