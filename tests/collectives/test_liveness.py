"""Where the ranks are."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from paceline.collectives.coordinator import Late
from paceline.collectives.liveness import FILE_VARIABLE, PeerPlace, StallWatch, are_equally_many


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
def test_hosts_count_as_equally_large_only_if_each_has_the_same_number_of_ranks(hosts, same) -> None:
    """Regression: 3 hosts with 3, 2 and 1 ranks counted as equally large. Only the number of ranks with local rank 1
    was checked: there are 2, on a host with 3 ranks, and 2 * 3 equals the total of 6 ranks."""
    transport: Any = Hosts(hosts)
    places = PeerPlace.of_all(transport, {})
    assert [place.local_size for place in places] == [hosts.count(host) for host in hosts]
    assert are_equally_many(places) == same


def test_resolved_stalls_are_reported_in_the_order_of_their_warnings(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "stalls"))
    watch, names = StallWatch(0, [0, 1], 1.0, 0.0), [f"gradient.{number}" for number in range(20)]
    watch._warn([Late(("allreduce", name), 2.0, [1], [0]) for name in names], 0.0)
    watch._warn([], 1.0)
    lines = [json.loads(line) for line in (tmp_path / "stalls").read_text().splitlines()]
    assert [line["name"] for line in lines if line["resolved"]] == names
