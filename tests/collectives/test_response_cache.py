from __future__ import annotations

from paceline.collectives.coordinator import Coordinator, Response, ResponseCache
from paceline.collectives.request import ALLREDUCE, Request


def request(name: str) -> Request:
    return Request(ALLREDUCE, name, ("float32",), ((3,),), "sum")


def ask(coordinator: Coordinator, member: ResponseCache, *names: str) -> tuple[Response, list[str]]:
    """What a rank requests when it is alone, and the response that it gets."""
    requests = {asked.key: asked for asked in map(request, names)}
    coordinator.receive(0, member.message(list(requests.values())))
    response = coordinator.respond()
    assert response is not None
    return response, [agreement.request.name for agreement in member.agreed(response, requests.get)]


def test_operation_that_all_ranks_have_requested_twice_is_requested_again_by_its_cache_slot():
    coordinator, member = Coordinator(1, 8), ResponseCache()
    for _ in range(2):
        ask(coordinator, member, "a")
    message = member.message([request("a"), request("b")])
    assert len(message.slots) == 1
    assert [asked.name for asked in message.requests] == ["b"]


def test_operation_is_not_requested_by_its_old_cache_slot_after_the_cache_was_renumbered():
    """It was kept, so that "a" was later asked for under the number that "b" had got in the new epoch."""
    coordinator, member = Coordinator(1, 1), ResponseCache()
    for name in ("a", "a", "b", "b"):
        ask(coordinator, member, name)
    # The cache has one slot and is full. So this response renumbers: "a" still uses its old number, and "b" gets a new number.
    response, done = ask(coordinator, member, "a", "b")
    assert response.epoch == 1
    assert done == ["a", "b"]
    assert ask(coordinator, member, "a")[1] == ["a"]
    assert ask(coordinator, member, "b", "a")[1] == ["b", "a"]
