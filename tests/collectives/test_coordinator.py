from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.collectives.coordinator import (
    INLINE_LIMIT_BYTES,
    Coordinator,
    Message,
    inline_fold,
    inline_payload,
    inline_result,
)
from paceline.collectives.request import ALLREDUCE, JOIN, Request
from tests.late import late

numpy = late("numpy")
pytestmark = pytest.mark.skipif(find_spec("numpy") is None, reason="needs numpy")


def request(name: str, *shape: int, kind: str = ALLREDUCE) -> Request:
    return Request(kind, name, ("float32",), (shape,), "sum")


def names(coordinator: Coordinator) -> list[str]:
    response = coordinator.respond()
    return [] if response is None else [agreement.request.name for agreement in response.agreements]


def agree_on(coordinator: Coordinator, name: str, *shape: int) -> int:
    """Both ranks ask; the number that the name gets."""
    for rank in range(2):
        coordinator.receive(rank, Message(0, (), (request(name, *shape),)))
    response = coordinator.respond()
    assert response is not None
    return response.agreements[0].slot


def test_operation_starts_after_every_rank_requested_it():
    coordinator = Coordinator(2, 8)
    coordinator.receive(0, Message(0, (), (request("a", 3), request("b", 3))))
    assert coordinator.respond() is None
    coordinator.receive(1, Message(0, (), (request("b", 3),)))
    assert names(coordinator) == ["b"]
    assert coordinator.waiting(0)[0][2] == [1]
    coordinator.receive(1, Message(0, (), (request("a", 3),)))
    assert names(coordinator) == ["a"]


def test_repeated_operation_gets_a_cache_slot():
    coordinator = Coordinator(2, 8)
    assert agree_on(coordinator, "a", 3) == -1
    slot = agree_on(coordinator, "a", 3)
    assert slot == 0
    coordinator.receive(1, Message(0, (slot,)))
    assert coordinator.respond() is None
    coordinator.receive(0, Message(0, (slot,)))
    response = coordinator.respond()
    assert response is not None
    assert response.slots == (slot,)
    assert not response.agreements


def test_cached_request_with_another_shape_gets_an_error():
    coordinator = Coordinator(2, 8)
    agree_on(coordinator, "a", 3)
    slot = agree_on(coordinator, "a", 3)
    coordinator.receive(0, Message(0, (slot,)))
    coordinator.receive(1, Message(0, (), (request("a", 4),)))
    response = coordinator.respond()
    assert response is not None
    assert response.agreements[0].error is not None
    assert "[3]" in response.agreements[0].error


@pytest.mark.parametrize("repeats", [1, 2, 3])
@pytest.mark.parametrize("kinds", [("device_allreduce", ALLREDUCE), (ALLREDUCE, "device_allreduce")])
def test_gpu_tensor_on_one_rank_and_cpu_tensor_on_another_get_an_error(kinds, repeats):
    coordinator = Coordinator(2, 8)
    for _ in range(repeats - 1):
        agree_on(coordinator, "a", 3)
    for rank, kind in enumerate(kinds):
        coordinator.receive(rank, Message(0, (), (request("a", 3, kind=kind),)))
    response = coordinator.respond()
    assert response is not None
    assert "devices" in (response.agreements[0].error or "")


def test_cache_slot_sent_before_the_cache_was_renumbered_is_still_resolved():
    coordinator = Coordinator(2, 1)
    agree_on(coordinator, "a", 3)
    slot = agree_on(coordinator, "a", 3)
    agree_on(coordinator, "b", 3)
    # The cache is full, so the next response renumbers its entries.
    assert agree_on(coordinator, "b", 3) == -1
    coordinator.receive(0, Message(0, (slot,)))
    coordinator.receive(1, Message(0, (), (request("b", 3),)))
    coordinator.receive(0, Message(0, (), (request("b", 3),)))
    response = coordinator.respond()
    assert response is not None
    assert response.epoch == 1
    coordinator.receive(1, Message(0, (slot,)))
    assert names(coordinator) == ["a"]


def test_operation_does_not_wait_for_joined_ranks():
    coordinator = Coordinator(2, 8)
    coordinator.receive(1, Message(0, (), (Request(JOIN, JOIN),)))
    coordinator.receive(0, Message(0, (), (request("a", 3),)))
    assert names(coordinator) == ["a"]
    coordinator.receive(0, Message(0, (), (Request(JOIN, JOIN),)))
    response = coordinator.respond()
    assert response is not None
    assert response.agreements[0].joined == 0


def task(array: Any, op: str = "sum", dtype: str = "float32", prescale: float = 1.0, out: Any = None) -> Any:
    request = Request(ALLREDUCE, "t", (dtype,), (array.shape,), op, prescale)
    return SimpleNamespace(request=request, arrays=[array], outs=[out])


def test_small_arrays_sent_with_the_requests_are_reduced_in_the_response():
    coordinator = Coordinator(2, 8)
    tasks = [task(numpy.array([1, 2], numpy.float32), "average"), task(numpy.array([3, 6], numpy.float32), "average")]
    for rank, asked in enumerate(tasks):
        coordinator.receive(rank, Message(0, (), (asked.request,), payload=inline_payload(asked)))
    response = coordinator.respond()
    assert response is not None
    ((place, data),) = response.results
    assert place == 0
    assert inline_result(tasks[0], data, 2).tolist() == [2, 4]


def test_inline_reduction_is_skipped_if_a_rank_sends_no_array():
    coordinator = Coordinator(2, 8)
    asked = task(numpy.ones(2, numpy.float32))
    coordinator.receive(0, Message(0, (), (asked.request,), payload=inline_payload(asked)))
    coordinator.receive(1, Message(0, (), (asked.request,)))
    response = coordinator.respond()
    assert response is not None
    assert not response.results
    # The coordinator must not keep the data of rank 0 for the next operation of this name.
    coordinator.receive(0, Message(0, (), (asked.request,)))
    coordinator.receive(1, Message(0, (), (asked.request,), payload=inline_payload(asked)))
    response = coordinator.respond()
    assert response is not None
    assert not response.results


def test_ranks_that_disagree_about_a_shape_get_an_error_and_no_result():
    coordinator = Coordinator(2, 8)
    for rank, asked in enumerate((task(numpy.ones(2, numpy.float32)), task(numpy.ones(3, numpy.float32)))):
        coordinator.receive(rank, Message(0, (), (asked.request,), payload=inline_payload(asked)))
    response = coordinator.respond()
    assert response is not None
    assert response.agreements[0].error is not None
    assert not response.results


@pytest.mark.parametrize(
    ("op", "wanted"),
    [("sum", [True, True]), ("average", [True, False]), ("min", [True, False]), ("max", [True, True])],
)
def test_inline_reduction_of_bools_equals_numpy(op, wanted):
    asked = task(numpy.array([True, False]), op, "bool")
    data = inline_fold(asked.request, [b"\x01\x00", b"\x01\x01"])
    assert inline_result(asked, data, 2).tolist() == wanted


@pytest.mark.promise("float16-bfloat16-summed-float32")
def test_inline_sum_of_half_precision_is_computed_in_float32():
    asked = task(numpy.array([2048], numpy.float16), dtype="float16")
    one = inline_payload(task(numpy.array([1], numpy.float16), dtype="float16"))
    data = inline_fold(asked.request, [inline_payload(asked), one, one])
    assert inline_result(asked, data, 3).tolist() == [2050]


def test_large_adasum_and_grouped_arrays_are_not_sent_inline_with_the_request():
    assert inline_payload(task(numpy.ones(INLINE_LIMIT_BYTES // 4 + 1, numpy.float32))) is None
    assert inline_payload(task(numpy.ones(2, numpy.float32), "adasum")) is None
    grouped = task(numpy.ones(2, numpy.float32))
    grouped.request = grouped.request._replace(grouped=True)
    assert inline_payload(grouped) is None
