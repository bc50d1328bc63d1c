"""Where the ranks are."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from paceline.collectives.liveness import PeerPlace, are_equally_many


class Hosts:
    """The transport of ranks on these hosts, as rank 0 has it."""

    rank = 0

    def __init__(self, hosts: str) -> None:
        self.size = len(hosts)
        self._hosts = hosts

    def gather_objects(self, own: Any) -> list[Any]:
        assert own[0] == socket.gethostname()
        return [(host, 1, "", None) for host in self._hosts]


@pytest.mark.parametrize(("hosts", "same"), [("aaabbc", False), ("aabb", True), ("abc", True), ("aab", False)])
def test_machines_have_equally_many_ranks_or_not(hosts, same) -> None:
    """Story: of 3, 2 and 1 ranks, one with local rank 1 said yes: 2 machines have one, and 3 * 2 is the number of ranks."""
    transport: Any = Hosts(hosts)
    places = PeerPlace.of_all(transport, {})
    assert [place.local_size for place in places] == [hosts.count(host) for host in hosts]
    assert are_equally_many(places) == same
