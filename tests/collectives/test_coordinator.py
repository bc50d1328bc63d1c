from __future__ import annotations

from paceline.collectives.coordinator import Coordinator, Message
from paceline.collectives.request import ALLREDUCE, JOIN, Request


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


def test_nothing_is_done_before_every_rank_has_asked():
    coordinator = Coordinator(2, 8)
    coordinator.receive(0, Message(0, (), (request("a", 3), request("b", 3))))
    assert coordinator.respond() is None
    coordinator.receive(1, Message(0, (), (request("b", 3),)))
    assert names(coordinator) == ["b"]
    assert coordinator.waiting(0)[0][2] == [1]
    coordinator.receive(1, Message(0, (), (request("a", 3),)))
    assert names(coordinator) == ["a"]


def test_a_name_gets_a_number_the_second_time_and_is_then_agreed_upon_by_it():
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


def test_a_rank_that_asks_for_another_shape_under_a_number_is_told():
    coordinator = Coordinator(2, 8)
    agree_on(coordinator, "a", 3)
    slot = agree_on(coordinator, "a", 3)
    coordinator.receive(0, Message(0, (slot,)))
    coordinator.receive(1, Message(0, (), (request("a", 4),)))
    response = coordinator.respond()
    assert response is not None
    assert response.agreements[0].error is not None
    assert "[3]" in response.agreements[0].error


def test_a_number_of_the_epoch_before_is_still_understood():
    coordinator = Coordinator(2, 1)
    agree_on(coordinator, "a", 3)
    slot = agree_on(coordinator, "a", 3)
    agree_on(coordinator, "b", 3)
    # The cache is full: the next response starts the numbers anew.
    assert agree_on(coordinator, "b", 3) == -1
    coordinator.receive(0, Message(0, (slot,)))
    coordinator.receive(1, Message(0, (), (request("b", 3),)))
    coordinator.receive(0, Message(0, (), (request("b", 3),)))
    response = coordinator.respond()
    assert response is not None
    assert response.epoch == 1
    coordinator.receive(1, Message(0, (slot,)))
    assert names(coordinator) == ["a"]


def test_ranks_that_joined_are_not_waited_for():
    coordinator = Coordinator(2, 8)
    coordinator.receive(1, Message(0, (), (Request(JOIN, JOIN),)))
    coordinator.receive(0, Message(0, (), (request("a", 3),)))
    assert names(coordinator) == ["a"]
    coordinator.receive(0, Message(0, (), (Request(JOIN, JOIN),)))
    response = coordinator.respond()
    assert response is not None
    assert response.agreements[0].joined == 0
