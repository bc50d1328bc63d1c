from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import TargetError
from paceline.targets.ssh import members
from paceline.targets.ssh.command import Ssh
from paceline.targets.ssh.hosts import SshHost
from paceline.targets.ssh.members import HostMember, Opening

A, B = SshHost(name="a"), SshHost(name="b")


class FakeLink(SimpleNamespace):
    """A link that notes that it was closed."""

    def __init__(self) -> None:
        super().__init__(lost=None, closed=threading.Event())

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opening]:
    """An `Opening` whose agents are what `answers` gives for each host, one answer after the other."""
    monkeypatch.setattr(members, "_AGAIN_S", 0.0)
    monkeypatch.setattr(Ssh, "at_once", lambda self, host: 2)

    def make(answers: dict[SshHost, list[Any]]) -> Opening:
        def open_member(ssh: Ssh, host: SshHost, **_: Any) -> HostMember:
            answer = answers[host].pop(0)
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, threading.Event):
                answer.wait(60)
                answer = answers[host].pop(0)
            return HostMember(host=host, link=answer)

        monkeypatch.setattr(members, "open_member", open_member)
        return Opening(Ssh(), python="python3", library_dir=Path("/lib"), folder="/tmp/x")

    return make


def test_failed_ssh_connection_keeps_its_reason_until_the_host_is_reached(opened: Callable[..., Opening]) -> None:
    opening = opened({A: [FakeLink()], B: [TargetError("it is down"), FakeLink()]})

    opening.open([A, B])
    assert opening.wait(60)
    assert [member.host for member in opening.members([B, A])] == [A]
    assert opening.failures == {B: "it is down"}

    opening.open([A, B])
    assert opening.wait(60)
    assert [member.host for member in opening.members([B, A])] == [B, A]
    assert opening.failures == {}


def test_dropped_ssh_connection_to_a_host_is_retried_once(opened: Callable[..., Opening]) -> None:
    dropped = TargetError("it has closed the connection. sshd's log there says why")
    opening = opened({A: [dropped, FakeLink()], B: [dropped, dropped, FakeLink()]})

    opening.open([A, B])
    assert opening.wait(60)

    assert [member.host for member in opening.members([A, B])] == [A]
    assert "closed" in opening.failures[B]


def test_lost_ssh_host_is_connected_again_by_a_new_link(opened: Callable[..., Opening]) -> None:
    first, second = FakeLink(), FakeLink()
    opening = opened({A: [first, second]})
    opening.open([A])
    assert opening.wait(60)

    first.lost = "a: nothing heard for 15 s"
    assert opening.members([A]) == []
    assert opening.failures == {A: "a: nothing heard for 15 s"}
    opening.open([A])
    assert opening.wait(60)

    assert [member.link for member in opening.members([A])] == [second]


def test_ssh_links_to_unused_hosts_are_closed_even_if_opened_late(opened: Callable[..., Opening]) -> None:
    kept, left, late, gate = FakeLink(), FakeLink(), FakeLink(), threading.Event()
    slow = SshHost(name="slow")
    opening = opened({A: [kept], B: [left], slow: [gate, late]})
    opening.open([A, B, slow])
    opening.wait_for_those_alike(60, 0.05)
    while len(opening.members([A, B])) < 2:
        opening.wait(0.01)

    assert opening.pending == [slow]
    opening.close(but=opening.members([A]))
    gate.set()

    assert late.closed.wait(60)
    assert left.closed.is_set()
    assert not kept.closed.is_set()


def test_ssh_link_that_opens_just_before_the_close_of_unused_hosts_is_kept(opened: Callable[..., Opening]) -> None:
    link = FakeLink()
    opening = opened({A: [link]})

    class Closing(threading.Condition):
        """A lock, behind which `close` comes as soon as the host's thread has stored the link."""

        def __exit__(self, *args: Any) -> None:
            super().__exit__(*args)
            if A in opening._members and not opening._closed:
                opening.close(but=[opening._members[A]])

    opening._changed = Closing()
    opening.open([A])
    assert opening.wait(60)
    for thread in threading.enumerate():
        if thread.name == "paceline-ssh-a":
            thread.join(60)
    assert opening._closed
    assert not link.closed.is_set()


@pytest.mark.promise("how-long-silent-node-waited")
@pytest.mark.usefixtures("ssh_client")
def test_connections_to_ssh_hosts_time_out_after_the_silence_limit_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(members.Link, "open", lambda argv, **values: given.update(values, argv=argv) or FakeLink())

    members.open_member(Ssh(silence_s=6.0), A, python="python3", library_dir=Path("/lib"), folder="/tmp/x")

    assert given["silence_s"] == 6.0
    assert "ServerAliveInterval=2" in given["argv"]
