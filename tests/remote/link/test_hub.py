from __future__ import annotations

import socket
import threading

import pytest

from paceline.remote.link.bootstrap import Ends
from paceline.remote.link.connection import AgentConnection
from paceline.remote.wire import frame
from tests.helpers import wait_until


def test_links_share_the_threads_of_one_hub(open_link):
    open_link("first")
    before = {thread for thread in threading.enumerate() if thread.name.startswith("paceline-")}
    others = [open_link(f"node-{number}") for number in range(3)]
    assert [link.run(["echo", "here"]).stdout for link in others] == [b"here\n"] * 3
    assert {thread for thread in threading.enumerate() if thread.name.startswith("paceline-")} <= before


def test_frame_that_cannot_be_handled_ends_its_link_alone(open_link, tmp_path):
    def fail(header, data):
        raise KeyError("pid")

    good = open_link("good")
    # More of them than the hub has threads that handle frames.
    for number in range(6):
        bad = open_link(f"bad-{number}")
        bad._connection._hear = fail
        bad.start(["true"], env={"PATH": "/bin:/usr/bin"}, cwd=str(tmp_path), log=str(tmp_path / "log"))
        wait_until(lambda bad=bad: bad.lost, "the loss")
        assert bad.lost == f"bad-{number}: what came can't be handled: KeyError('pid')"
    good.start(["true"], env={"PATH": "/bin:/usr/bin"}, cwd=str(tmp_path), log=str(tmp_path / "log"))
    wait_until(good.ends, "the end of a command")


class Peer:
    """A connection to this test, which plays the agent. `gate` holds up all that the connection hears."""

    def __init__(self):
        ours, self.sock = socket.socketpair()
        self.heard, self.gate = [], threading.Event()
        self.connection = AgentConnection(Ends.of_socket(ours), "peer", 15.0, self._hear)
        self.connection.start(b"")

    def _hear(self, header, data):
        self.gate.wait(30)
        self.heard.append(header["number"])


@pytest.fixture
def peer():
    made = Peer()
    yield made
    made.gate.set()
    made.sock.close()
    made.connection.close(5.0)


def test_reading_pauses_while_frames_wait_to_be_handled(peer):
    sender = threading.Thread(
        target=lambda: [peer.sock.sendall(frame({"op": "file", "number": n}, b"x" * 50_000)) for n in range(400)]
    )
    sender.start()
    wait_until(lambda: peer.connection._is_paused, "the pause")
    assert len(peer.connection._inward) < 100
    peer.gate.set()
    sender.join(30)
    wait_until(lambda: len(peer.heard) == 400, "all frames")
    assert peer.heard == list(range(400))


def test_answer_passes_frames_that_wait_to_be_handled(peer):
    peer.sock.sendall(frame({"op": "file", "number": 0}))
    pending = peer.connection.send("load", {})
    peer.sock.sendall(frame({"re": pending.number, "found": 1}))
    assert peer.connection.answer(pending, "load", 10.0)[0]["found"] == 1
    assert peer.heard == []


def test_pause_is_noticed_even_if_all_frames_were_handled_meanwhile(peer, monkeypatch):
    # Story: the hub counted the waiting frames, a filer then handled all of them, and the hub paused for ever.
    class Counted(type(peer.connection._inward)):
        def __len__(self):
            found = super().__len__()
            if found >= 64 and not peer.gate.is_set() and threading.current_thread().name == "paceline-links":
                peer.gate.set()
                threading.Event().wait(0.5)
            return found

    peer.connection._inward = Counted(peer.connection._inward)
    peer.sock.sendall(b"".join(frame({"op": "file", "number": n}) for n in range(64)))
    wait_until(lambda: len(peer.heard) == 64, "the first frames")
    peer.sock.sendall(frame({"op": "file", "number": 64}))
    wait_until(lambda: len(peer.heard) == 65, "a frame after the pause")
