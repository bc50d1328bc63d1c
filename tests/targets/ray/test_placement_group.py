"""A placement group held by a driver, which is a script here; nodes that connect are our sockets."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EngineError, TargetError
from paceline.targets.ray.demand import ClusterDemand
from paceline.targets.ray.placement_group import GroupRequest, Holding, LostError
from tests.helpers import wait_until

#: This driver prints its lines, stores the requests, and ends when its standard input ends.
DRIVER = """\
import json, os, sys
request = sys.stdin.readline()
with open({asked!r} + ".new", "w") as file:
    file.write(request)
os.rename({asked!r} + ".new", {asked!r})
for line in {lines!r}:
    print(json.dumps(line), flush=True)
sys.stdin.read()
open({ended!r}, "w").close()
"""


class Driver:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.holdings: list[Holding] = []

    def hold(
        self, *lines: dict[str, Any], patience_s: float | None = 0.0, nodes: int = 2, address: str = ""
    ) -> Holding:
        text = DRIVER.format(asked=str(self.folder / "asked"), ended=str(self.folder / "ended"), lines=list(lines))
        (self.folder / "driver.py").write_text(text)
        program = self.folder / "ray python"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} "{self.folder}/driver.py"\n')
        program.chmod(0o755)
        asked = GroupRequest(
            demand=ClusterDemand(bundles=({"CPU": 2.0},) * nodes),
            run_id="x_1",
            ray_python=str(program),
            library_dir=self.folder,
            folder="/tmp",
            python=None,
            submitter=None,
            patience_s=patience_s,
            is_shared=True,
            silence_s=15.0,
            address=address,
        )
        holding = Holding(asked)
        self.holdings.append(holding)
        return holding

    @property
    def asked(self) -> dict[str, Any]:
        path = self.folder / "asked"
        wait_until(path.exists, "the driver was asked")
        return dict(json.loads(path.read_text()))

    def connect(self, rank: int, **told: Any) -> socket.socket:
        asked = self.asked
        sock = socket.create_connection(("127.0.0.1", asked["port"]))
        sock.sendall(json.dumps({"token": asked["token"], "rank": rank, **told}).encode() + b"\nthe agent's")
        return sock


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    found = Driver(tmp_path)
    yield found
    for holding in found.holdings:
        holding.close()


def is_shown_the_door(sock: socket.socket) -> bool:
    sock.settimeout(60)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True  # the driver closed the connection before it had read everything


@pytest.mark.parametrize(("address", "is_kept"), [("127.0.0.2", True), ("192.0.2.1", False), ("", False)])
def test_ray_driver_listens_only_on_the_address_of_the_cluster(driver: Driver, address: str, is_kept: bool) -> None:
    driver.hold({"is": "connected"}, address=address)
    asked = driver.asked
    # The driver can't listen on an address that its machine does not have, such as the outer address of a NAT.
    assert asked.get("host") == (address if is_kept else None)
    for other, is_open in {"127.0.0.2": True, "127.0.0.1": not is_kept}.items():
        with socket.socket() as sock:
            assert (sock.connect_ex((other, asked["port"])) == 0) == is_open


def never(text: str) -> bool:
    return False


def waiting(free: float = 0.0, count: int = 2) -> dict[str, Any]:
    nodes = [{"name": f"n{n}", "node_id": str(n), "total": {"CPU": 2.0}, "free": {"CPU": free}} for n in range(count)]
    return {"is": "waiting", "nodes": nodes}


def test_nodes_are_granted_after_each_connected_with_the_token(driver: Driver) -> None:
    holding = driver.hold({"is": "connected"}, {"is": "placed"})
    assert driver.asked["bundles"] == [{"CPU": 2.0}, {"CPU": 2.0}]
    with driver.connect(1, hostname="b"), driver.connect(0, hostname="a"):
        taken = holding.wait(never)
        assert taken is not None
        assert [taken[rank].told["hostname"] for rank in (0, 1)] == ["a", "b"]
        # All bytes after the first line are for the agent.
        assert taken[0].sock.recv(100) == b"the agent's"
        assert taken[0].told["token"] is None


def test_connection_without_the_token_is_closed(driver: Driver) -> None:
    holding = driver.hold({"is": "placed"}, nodes=1)
    for data in (b"", b"GET / HTTP/1.0\n", b'{"rank": 0, "token": "x"}\n', b'{"token": 1}\n', b"[]\n", b"\xff\n"):
        with socket.create_connection(("127.0.0.1", driver.asked["port"])) as stranger:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            assert is_shown_the_door(stranger)
    with driver.connect(0, hostname="a"):
        assert holding.wait(never) is not None


def test_second_connection_to_the_ray_driver_under_the_same_rank_is_closed(driver: Driver) -> None:
    holding = driver.hold({"is": "placed"}, nodes=1)
    with driver.connect(0, hostname="first"):
        taken = holding.wait(never)
        assert taken is not None
        with driver.connect(0, hostname="second") as second:
            assert is_shown_the_door(second)
        assert taken[0].told["hostname"] == "first"


def test_ray_run_reports_what_it_waits_for_until_the_wait_is_canceled(driver: Driver) -> None:
    holding = driver.hold(waiting())
    said: list[str] = []

    def give_up(text: str) -> bool:
        said.append(text)
        return "free" in text

    assert holding.wait(give_up) is None
    assert said[-1] == "waits for 2 nodes with 2 CPU each; free: n0 0 of 2 CPU; n1 0 of 2 CPU"


def test_wait_for_ray_nodes_ends_with_target_error_if_the_cluster_is_too_small(driver: Driver) -> None:
    with pytest.raises(TargetError, match=r"needs 2 nodes .*; the cluster has n0 \(2 CPU\)\. Ask for less"):
        driver.hold(waiting(count=1)).wait(never)


def test_run_without_a_wait_limit_waits_for_a_larger_ray_cluster(driver: Driver) -> None:
    holding = driver.hold(waiting(count=1), patience_s=None)
    deadline = time.monotonic() + 0.5
    assert holding.wait(lambda text: time.monotonic() > deadline) is None


def test_node_that_dies_before_it_is_granted_raises_lost_error(driver: Driver) -> None:
    holding = driver.hold({"is": "placed"}, {"is": "ended", "rank": 1, "why": "Ray says: node is dead"})
    with pytest.raises(LostError, match="node 1 of the run: Ray says: node is dead"):
        holding.wait(never)


def test_death_of_the_only_node_raises_lost_error(driver: Driver) -> None:
    ended = {"is": "ended", "rank": 0, "why": "Ray says: node is dead"}
    holding = driver.hold({"is": "placed"}, ended, {"is": "failed", "why": "every node's task has ended"}, nodes=1)
    wait_until(lambda: holding._events.qsize() >= 3, "the driver has said so")
    with pytest.raises(LostError, match="node 0 of the run: Ray says: node is dead"):
        holding.wait(never)


def test_unreachable_control_store_of_ray_raises_engine_error(driver: Driver) -> None:
    holding = driver.hold({"is": "failed", "why": "ConnectionError: no GCS."})
    with pytest.raises(EngineError, match="Ray can't give the run its nodes: ConnectionError: no GCS"):
        holding.wait(never)


def test_missing_interpreter_raises_target_error(tmp_path: Path) -> None:
    asked = GroupRequest(
        **{"demand": ClusterDemand(bundles=({"CPU": 1.0},)), "run_id": "x", "ray_python": str(tmp_path / "none")},
        **{"library_dir": tmp_path, "folder": "/tmp", "python": None, "submitter": None},
        patience_s=0.0,
        is_shared=True,
        silence_s=15.0,
    )
    with pytest.raises(TargetError, match=r"interpreter .*none' can't be run"):
        Holding(asked)


def test_node_lost_after_placement_is_reported(driver: Driver) -> None:
    holding = driver.hold({"is": "placed"}, {"is": "ended", "rank": 0, "why": "killed for memory"}, nodes=2)
    wait_until(holding.lost, "the loss is told")
    assert holding.lost() == {0: "killed for memory"}
    holding.close()
    assert holding.lost() == {}


def test_closing_the_placement_ends_the_ray_driver(driver: Driver) -> None:
    holding = driver.hold(waiting())
    assert driver.asked["name"] == "paceline x_1"
    holding.close()
    assert (driver.folder / "ended").exists()
    holding.close()
