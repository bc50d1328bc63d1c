"""Connections between nodes: both on this machine's loopback."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from paceline.doctor import connections
from paceline.doctor.connections import _peers, check_network, check_ports
from tests.doctor.conftest import answers


@pytest.fixture
def on_loopback(examination):
    examination.interface = "eth0"  # eth0's addresses are this machine's too
    return examination


def test_network_and_port_checks_of_connected_nodes_report_one_line_each(on_loopback):
    (network,) = check_network(on_loopback)
    assert (network.level, network.seen) == ("ok", "node0 127.0.1.1 (eth0), node1 127.0.1.2 (eth0)")
    (ports,) = check_ports(on_loopback)
    assert (ports.level, ports.seen.startswith("2 connections between 2 nodes, the slowest in ")) == ("ok", True)


def test_pair_of_nodes_that_can_not_connect_is_named(on_loopback, two, monkeypatch):
    # No process listens on node1.
    monkeypatch.setattr(connections, "_CONNECT_S", 4.0)
    two[1].wrong = lambda argv: answers('PACELINE-ANSWERS {"answered": 0}') if "listen" in argv else None
    list(check_network(on_loopback))
    failed = next(finding for finding in check_ports(on_loopback) if finding.node == "node0")
    assert failed.level == "fail"
    assert "can't connect to node1 (127.0.1.2, port " in failed.seen
    assert "Connection refused" in failed.seen
    assert "firewall" in failed.advice


_SOMEBODY_ELSE = """
import socket, sys
with socket.create_server(("127.0.1.2", int(sys.argv[1]))) as server:
    client, _ = server.accept()
    client.recv(99)
    client.sendall(b"HTTP/1.1 400 what?")
"""


def test_address_at_which_another_process_listens_fails_the_network_check(on_loopback, two, monkeypatch):
    monkeypatch.setattr(connections, "_CONNECT_S", 8.0)

    def listens_as_another(argv):
        if "listen" not in argv:
            return None
        port = re.search(rb'"port": (\d+)', two[1].inputs[-1])[1].decode()
        subprocess.run([sys.executable, "-c", _SOMEBODY_ELSE, port], check=True, timeout=90)
        return answers('PACELINE-ANSWERS {"answered": 0}')

    two[1].wrong = listens_as_another
    list(check_network(on_loopback))
    assert [finding.level for finding in check_ports(on_loopback) if finding.node == "node0"] == ["fail"]


def test_port_check_is_skipped_if_nodes_have_no_common_network(examination, two):
    two[0].interfaces, two[1].interfaces = {"eth0": ("10.0.0.1", 24)}, {"eth0": ("10.1.0.1", 24)}
    (network,) = check_network(examination)
    assert network.level == "fail"
    assert "node0: eth0 10.0.0.1/24; node1: eth0 10.1.0.1/24" in network.seen
    assert [finding.level for finding in check_ports(examination)] == ["skipped"]


def test_network_check_fails_if_two_node_names_have_the_same_address(examination, two):
    own = {"lo": ("127.0.0.1", 8), "docker0": ("172.17.0.1", 16), "eth0": ("10.0.0.1", 24)}
    two[0].interfaces = two[1].interfaces = own
    (network,) = check_network(examination)
    assert (network.level, network.seen) == ("fail", "node0 and node1 have the same addresses (10.0.0.1)")
    assert "name each machine once" in network.advice


def test_network_check_fails_if_no_node_has_the_requested_interface(examination):
    examination.interface = "ib7"
    (network,) = check_network(examination)
    assert network.level == "fail"
    assert network.seen.startswith("no network is common to all nodes with an interface 'ib7' (node0: lo ")


def test_connection_check_tries_all_pairs_of_few_nodes_and_a_ring_of_many():
    assert _peers(["a"]) == {"a": ["a"]}
    assert _peers(["a", "b", "c"]) == {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}
    names = [f"n{number}" for number in range(40)]
    ring = _peers(names)
    assert ring["n39"] == ["n0", "n19"]
    assert {other for others in ring.values() for other in others} == set(names)
