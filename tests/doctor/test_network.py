"""The network that nodes share."""

from __future__ import annotations

import pytest

from paceline.doctor.network import NetworkPlace, common_network, same_machine

LO = {"lo": ("127.0.0.1", 8)}


def test_a_common_network_is_found_though_interfaces_have_other_names():
    nodes = {
        "a": {**LO, "eth0": ("10.0.0.1", 24), "eth1": ("192.168.1.1", 24)},
        "b": {**LO, "eno1": ("10.0.0.2", 24)},
    }
    assert common_network(nodes) == {
        "a": NetworkPlace(interface="eth0", address="10.0.0.1", network="10.0.0.0/24"),
        "b": NetworkPlace(interface="eno1", address="10.0.0.2", network="10.0.0.0/24"),
    }


@pytest.mark.parametrize("bridge", ["docker0", "virbr0", "mybridge"])
def test_a_bridge_that_every_node_has_for_itself_is_none(bridge):
    nodes = {"a": {bridge: ("172.17.0.1", 16)}, "b": {bridge: ("172.17.0.1", 16)}}
    assert common_network(nodes) is None


def test_nodes_are_one_machine_only_if_no_address_tells_them_apart():
    bridge = {"docker0": ("172.17.0.1", 16)}
    a, b = {"eth0": ("10.0.0.1", 24)}, {"eth0": ("10.1.0.1", 24)}
    assert same_machine({"one": {**a, **bridge}, "two": {**b, **bridge}, "three": {**a}}) == ["one", "three"]
    assert same_machine({"one": {**a, **bridge}, "two": {**b, **bridge}}) == []
    assert same_machine({"one": {**LO, **bridge}, "two": {**LO, **bridge}}) == []


def test_of_two_networks_the_interface_that_is_asked_for_counts():
    nodes = {
        name: {"eth0": (f"10.0.0.{number}", 16), "ib0": (f"10.9.0.{number}", 24)}
        for number, name in enumerate(("a", "b"), start=1)
    }
    assert common_network(nodes)["a"].interface == "eth0"
    assert common_network(nodes, "ib0")["b"].address == "10.9.0.2"
    assert common_network(nodes, "ib7") is None


def test_a_node_that_is_alone_is_reached_by_its_loopback():
    assert common_network({"a": {**LO, "eth0": ("10.0.0.1", 24)}})["a"].address == "127.0.0.1"
    assert common_network({"a": LO, "b": LO}) is None
