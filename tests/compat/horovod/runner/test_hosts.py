from __future__ import annotations

import socket

import pytest

from paceline.compat.horovod.runner import hosts
from paceline.compat.horovod.runner.hosts import Host
from paceline.errors import UserError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a:2", [("a", 2)]),
        ("a:2,b:4", [("a", 2), ("b", 4)]),
        ("a, b:4", [("a", 1), ("b", 4)]),
        ("10.0.0.7:2", [("10.0.0.7", 2)]),
        ("[fe80::1]:3", [("fe80::1", 3)]),
    ],
)
def test_hosts_are_names_with_slots(text, found):
    assert [(host.name, host.slots) for host in hosts.parse(text)] == found


@pytest.mark.parametrize("text", ["", "a:0", "a:-1", "a:x", "a:2,", "-oProxyCommand=x:2", "a b:2", "a;ls:2", "a\nb:1"])
def test_what_is_no_host_is_refused(text):
    with pytest.raises(UserError, match="is no host with its slots"):
        hosts.parse(text)


def test_a_file_has_a_line_for_each_host(tmp_path):
    path = tmp_path / "hosts with spaces"
    path.write_text("# the lab\na slots=2\n\nb slots = 3  # the big one\nc:4\nd\n")
    assert [(host.name, host.slots) for host in hosts.read(str(path))] == [("a", 2), ("b", 3), ("c", 4), ("d", 1)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("a slots=0\n", "line 1"), ("a\nb max=3\n", "line 2"), ("# nothing\n", "names no host"), ("", "names no host")],
)
def test_a_file_with_a_wrong_line_is_refused(tmp_path, text, complaint):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=complaint):
        hosts.read(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--hostfile '.*gone' can't be read"):
        hosts.read(str(tmp_path / "gone"))


def test_ranks_fill_the_hosts_in_order():
    # host:   a        b        c
    # rank:   0 1      2 3      4
    # local:  0 1      0 1      0
    # cross:  0 0      1 1      2       among the hosts with that local rank
    places = hosts.slots([Host(name="a", slots=2), Host(name="b", slots=2), Host(name="c", slots=4)], 5)
    assert [(p.rank, p.host, p.local_rank, p.local_size) for p in places] == [
        (0, "a", 0, 2),
        (1, "a", 1, 2),
        (2, "b", 0, 2),
        (3, "b", 1, 2),
        (4, "c", 0, 1),
    ]
    assert [(p.cross_rank, p.cross_size) for p in places] == [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)]


def test_a_host_that_is_named_twice_is_one_host():
    places = hosts.slots([Host(name="a"), Host(name="b"), Host(name="a")], 3)
    assert [(place.host, place.local_rank, place.local_size) for place in places] == [
        ("a", 0, 2),
        ("a", 1, 2),
        ("b", 0, 1),
    ]


def test_hosts_that_are_not_needed_are_left_out():
    assert {place.host for place in hosts.slots([Host(name="a", slots=2), Host(name="b", slots=2)], 2)} == {"a"}


def test_too_few_slots_are_refused():
    with pytest.raises(UserError, match=r"-np 5 needs as many slots, but a:2,b:2 has 4"):
        hosts.slots([Host(name="a", slots=2), Host(name="b", slots=2)], 5)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.0.9", socket.gethostname()])
def test_this_machine_knows_itself(name):
    assert hosts.is_here(name)


def test_another_address_is_another_machine():
    assert not hosts.is_here("192.0.2.1")


def test_a_name_that_nobody_knows_is_refused():
    with pytest.raises(UserError, match=r"'nowhere\.invalid' is not known here"):
        hosts.is_here("nowhere.invalid")
