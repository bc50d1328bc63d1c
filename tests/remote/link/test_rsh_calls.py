"""What the supervisor does of the remote shell between nodes, in every order in which its parts may come."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline.job.plan import Node
from paceline.remote.link.rsh_calls import RshCalls


class FakeLink:
    """A node's link. may_start: allows the answer to `start`; on_start: called on the node before that."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_rsh: Callable[[dict[str, Any]], None] = lambda header: None
        self.on_tagged_end: Callable[[dict[str, Any]], None] = lambda header: None
        self.on_start: Callable[[str], None] = lambda tag: None
        self.may_start, self.is_starting = threading.Event(), threading.Event()
        self.may_start.set()
        self.signals: list[tuple[int, int]] = []
        self.answers: list[tuple[int, int, str]] = []

    def start(self, argv: list[str], *, tag: str, **_: Any) -> int:
        self.on_start(tag)
        self.is_starting.set()
        assert self.may_start.wait(60)
        return 41

    def signal(self, pid: int, number: int) -> bool:
        self.signals.append((pid, number))
        return True

    def answer_rsh(self, number: int, code: int, text: str = "") -> None:
        self.answers.append((number, code, text))


@pytest.fixture
def links() -> list[Any]:
    links: list[Any] = [FakeLink("a"), FakeLink("b")]
    nodes = [Node(node_rank=rank, name=link.name, address=link.name, cores=1) for rank, link in enumerate(links)]
    RshCalls(links, nodes, {}, "log")
    return links


RSH = {"op": "rsh", "number": 1, "host": "b", "command": "orted"}
GONE = {"op": "rsh_gone", "number": 1}


def settle() -> None:
    """Wait until no call has a thread any more."""
    while any(thread.name == "paceline-rsh" for thread in threading.enumerate()):
        time.sleep(0.005)


def test_caller_gets_the_exit_code_of_its_remote_command(links: list[Any]) -> None:
    links[0].on_rsh(RSH)
    settle()
    links[1].on_tagged_end({"tag": "a 1", "code": 3})
    assert links[0].answers == [(1, 3, "")]
    links[0].on_rsh(GONE)
    settle()
    assert not links[1].signals


def test_remote_command_that_ended_during_start_gets_no_signal(links: list[Any]) -> None:
    links[1].on_start = lambda tag: links[1].on_tagged_end({"tag": tag, "code": 0})
    links[0].on_rsh(RSH)
    settle()
    links[0].on_rsh(GONE)
    settle()
    assert (links[0].answers, links[1].signals) == ([(1, 0, "")], [])


def test_shell_killed_during_start_ends_its_command(links: list[Any]) -> None:
    """The hang-up came before there was a process to send it to, and was forgotten: the command ran on."""
    links[1].may_start.clear()
    links[0].on_rsh(RSH)
    assert links[1].is_starting.wait(60)
    links[0].on_rsh(GONE)
    while len([thread for thread in threading.enumerate() if thread.name == "paceline-rsh"]) > 1:
        time.sleep(0.005)
    assert not links[1].signals
    links[1].may_start.set()
    settle()
    assert links[1].signals == [(41, signal.SIGHUP)]
    assert not links[0].answers


def test_unknown_host_is_refused_with_the_node_names(links: list[Any]) -> None:
    for link in links:
        link.hello = type("Hello", (), {"host": link.name})
    links[0].on_rsh({**RSH, "host": "me@c"})
    settle()
    assert links[0].answers == [(1, 255, "'c' is not a node of this run; its nodes are a, b.")]
