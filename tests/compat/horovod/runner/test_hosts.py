from __future__ import annotations

import socket

import pytest

from paceline.compat.horovod.runner import hosts
from paceline.compat.horovod.runner.hosts import Host, HostWatch, from_script
from paceline.errors import UserError
from tests.helpers import wait_until, write_program


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
def test_host_list_is_parsed_into_names_and_slots(text, found):
    assert [(host.name, host.slots) for host in hosts.parse(text)] == found


@pytest.mark.parametrize("text", ["", "a:0", "a:-1", "a:x", "a:2,", "-oProxyCommand=x:2", "a b:2", "a;ls:2", "a\nb:1"])
def test_invalid_host_text_is_refused(text):
    with pytest.raises(UserError, match="is not a host with its slots"):
        hosts.parse(text)


def test_hostfile_is_parsed_into_one_host_per_line_with_its_slots(tmp_path):
    path = tmp_path / "hosts with spaces"
    path.write_text("# the lab\na slots=2\n\nb slots = 3  # the big one\nc:4\nd\n")
    assert [(host.name, host.slots) for host in hosts.read(str(path))] == [("a", 2), ("b", 3), ("c", 4), ("d", 1)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("a slots=0\n", "line 1"), ("a\nb max=3\n", "line 2"), ("# nothing\n", "names no host"), ("", "names no host")],
)
def test_hostfile_with_an_invalid_line_is_refused(tmp_path, text, complaint):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=complaint):
        hosts.read(str(path))


def test_missing_hostfile_is_named_in_the_error(tmp_path):
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


def test_host_named_twice_is_one_host():
    places = hosts.slots([Host(name="a"), Host(name="b"), Host(name="a")], 3)
    assert [(place.host, place.local_rank, place.local_size) for place in places] == [
        ("a", 0, 2),
        ("a", 1, 2),
        ("b", 0, 1),
    ]


def test_hosts_that_no_rank_is_assigned_to_are_left_out_of_the_assignment():
    assert {place.host for place in hosts.slots([Host(name="a", slots=2), Host(name="b", slots=2)], 2)} == {"a"}


def test_np_over_the_slot_count_is_refused():
    with pytest.raises(UserError, match=r"-np 5 needs as many slots, but a:2,b:2 has 4"):
        hosts.slots([Host(name="a", slots=2), Host(name="b", slots=2)], 5)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.0.9", socket.gethostname()])
def test_loopback_addresses_and_the_own_host_name_are_recognized_as_this_machine(name):
    assert hosts.is_here(name)


def test_address_of_another_machine_is_not_recognized_as_this_machine():
    assert not hosts.is_here("192.0.2.1")


def test_unresolvable_host_name_is_refused():
    with pytest.raises(UserError, match=r"'nowhere\.invalid' is not known here"):
        hosts.is_here("nowhere.invalid")


def test_host_without_slots_in_the_discovery_scripts_output_gets_the_default_slot_count(tmp_path):
    script = write_program(tmp_path / "d.sh", "#!/bin/sh\nprintf 'a:2\\n\\n b\\n'\n")
    assert from_script(str(script), 3)() == [Host(name="a", slots=2), Host(name="b", slots=3)]
    assert from_script(str(script), None)()[1] == Host(name="b", slots=1)
    silent = write_program(tmp_path / "none.sh", "#!/bin/sh\n")
    assert from_script(str(silent), None)() == []


def test_discovery_script_may_be_a_shell_command(tmp_path, monkeypatch):
    """A script without `#!`, with arguments, in a folder with a blank, by a name alone, and a command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    for name in ("plain.sh", "a b/plain.sh"):
        write_program(tmp_path / name, "printf '%s\\n' ${1:-a:2}\n")
    for command in (
        "plain.sh",
        "./plain.sh",
        str(tmp_path / "a b" / "plain.sh"),
        "./plain.sh a:2",
        "echo a | sed s/$/:2/",
    ):
        assert from_script(command, 3)() == [Host(name="a", slots=2)], command
    with pytest.raises(UserError, match=r"'\./none\.sh' ended with exit code 127: "):
        from_script("./none.sh", None)()


def test_discovery_script_over_its_timeout_is_killed_with_children(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "_SCRIPT_S", 0.5)
    with pytest.raises(UserError, match=r"can't be run: it took more than 0\.5 s"):
        from_script("sleep 600 | cat", None)()


@pytest.mark.parametrize(
    ("text", "told"),
    [("#!/bin/sh\necho gone >&2; exit 3\n", "exit code 3: gone"), ("#!/bin/sh\necho -x:y\n", "is not a host")],
)
def test_discovery_script_that_fails_or_prints_an_invalid_host_raises_an_error_with_the_reason(tmp_path, text, told):
    script = write_program(tmp_path / "d.sh", text)
    with pytest.raises(UserError, match=told):
        from_script(str(script), None)()


def test_failed_host_returns_only_after_its_cooldown():
    found = [Host(name="a"), Host(name="b")]
    for cooldown, waits in ((None, [1e9, 1e9]), ((5, 12), [5, 10, 12, 12])):
        now = [0.0]
        watch = HostWatch(lambda: found, cooldown, lambda now=now: now[0])
        for wait in waits:
            watch.failed("a")
            now[0] += wait - 1
            assert watch.usable() == [Host(name="b")]
            now[0] += 1
            assert watch.usable() == (found if cooldown else [Host(name="b")])
        watch.close()


def test_host_changes_are_detected_and_failed_discovery_is_ignored(monkeypatch):
    monkeypatch.setattr(hosts, "_LOOK_S", 0.01)
    answers = [[Host(name="a")]]

    def ask():
        if not answers[-1]:
            raise UserError("not now")
        return answers[-1]

    watch = HostWatch(ask, None)
    answers.append([])
    wait_until(lambda: watch.error is not None, "the error")
    assert watch.usable() == [Host(name="a")]
    answers.append([Host(name="a"), Host(name="b")])
    wait_until(lambda: len(watch.usable()) == 2 and watch.error is None, "b")
    watch.close()
