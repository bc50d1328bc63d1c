from __future__ import annotations

import pytest

from paceline.errors import TargetError
from paceline.remote.addresses import Machine, choose

LOOPBACK = {"lo": ("127.0.0.1", 8)}


def test_nodes_use_the_addresses_by_which_ssh_reached_them() -> None:
    first = Machine(
        name="a", interfaces=LOOPBACK | {"eth0": ("10.0.0.1", 24), "ib0": ("10.9.0.1", 24)}, arrived_at="10.0.0.1"
    )
    second = Machine(name="b", interfaces={"eno1": ("10.0.0.2", 24), "ib0": ("10.9.0.2", 24)}, arrived_at="10.0.0.2")

    assert choose([first, second]) == [("10.0.0.1", "eth0"), ("10.0.0.2", "eno1")]
    assert choose([first]) == [("10.0.0.1", "eth0")]
    assert choose([first, second], "ib0") == [("10.9.0.1", "ib0"), ("10.9.0.2", "ib0")]


def test_this_machine_as_a_node_gets_a_reachable_address() -> None:
    here = Machine(
        name="localhost",
        interfaces=LOOPBACK | {"docker0": ("172.17.0.1", 16), "wlan0": ("192.168.1.5", 24), "eth0": ("10.0.0.1", 24)},
        arrived_at="127.0.0.1",
    )
    there = Machine(
        name="b", interfaces={"docker0": ("172.17.0.1", 16), "eth0": ("10.0.0.2", 24)}, arrived_at="10.0.0.2"
    )

    assert choose([here, there]) == [("10.0.0.1", "eth0"), ("10.0.0.2", "eth0")]
    assert choose([here]) == [("192.168.1.5", "wlan0")]


def test_hosts_with_separate_public_addresses_use_their_common_network() -> None:
    one = Machine(
        name="a", interfaces={"wan": ("198.51.100.1", 32), "lan": ("10.0.0.1", 16)}, arrived_at="198.51.100.1"
    )
    two = Machine(name="b", interfaces={"wan": ("203.0.113.1", 32), "lan": ("10.0.7.1", 16)}, arrived_at="203.0.113.1")

    assert choose([one, two]) == [("10.0.0.1", "lan"), ("10.0.7.1", "lan")]


def test_hosts_without_a_common_network_use_the_addresses_at_which_ssh_reached_them() -> None:
    one = Machine(name="a", interfaces={"eth0": ("10.1.0.1", 24)}, arrived_at="10.1.0.1")
    two = Machine(name="b", interfaces={"eth0": ("10.2.0.1", 24)}, arrived_at="10.2.0.1")
    unknown = Machine(name="c", interfaces={}, arrived_at="2001:db8::1")

    assert choose([one, two]) == [("10.1.0.1", "eth0"), ("10.2.0.1", "eth0")]
    assert choose([unknown]) == [("2001:db8::1", None)]


def test_missing_interface_is_refused_with_the_available_ones() -> None:
    machine = Machine(name="a", interfaces=LOOPBACK | {"eth0": ("10.0.0.1", 24)})
    with pytest.raises(TargetError, match=r"'a' has no network interface 'ib0'.*it has eth0, lo"):
        choose([machine], "ib0")
