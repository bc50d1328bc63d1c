from __future__ import annotations

import contextlib
import os
import socket
import threading
from functools import partial

import pytest

from paceline.remote.agent.send_queue import BULK
from paceline.remote.link import connection
from paceline.remote.link.bootstrap import Ends
from paceline.remote.link.connection import AgentConnection
from paceline.remote.link.hub import hub
from paceline.remote.link.messages import LinkError
from paceline.remote.wire import Frames, frame
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
    # Let several links fail, because a single error might end only one of the threads that handle frames.
    for number in range(6):
        bad = open_link(f"bad-{number}")
        bad._connection._hear = fail
        bad.start(["true"], env={"PATH": "/bin:/usr/bin"}, cwd=str(tmp_path), log=str(tmp_path / "log"))
        wait_until(lambda bad=bad: bad.lost, "the loss")
        assert bad.lost == f"bad-{number}: what came can't be handled: KeyError('pid')"
    good.start(["true"], env={"PATH": "/bin:/usr/bin"}, cwd=str(tmp_path), log=str(tmp_path / "log"))
    wait_until(good.ends, "the end of a command")


class Peer:
    """A connection to this test, which plays the agent. `gate` holds up the handling of received frames."""

    def __init__(self, on_lost=lambda: None, **values):
        ours, self.sock = socket.socketpair()
        self.heard, self.gate = [], threading.Event()
        ends = Ends.of_socket(ours)
        for name, value in values.items():
            setattr(ends, name, value)
        self.connection = AgentConnection(ends, "peer", 15.0, self._hear, on_lost)

    def _hear(self, header, data):
        self.gate.wait(30)
        self.heard.append(header["number"])

    def send(self, *numbers, size=0):
        self.sock.sendall(b"".join(frame({"op": "file", "number": n}, b"x" * size) for n in numbers))

    def leave(self):
        # Don't close the socket: if requests are unread, the other side would get an error instead of the end of the
        # connection.
        self.sock.shutdown(socket.SHUT_WR)

    def answers(self):
        """Whether a request gets its answer, as over any link in use."""
        pending = self.connection.send("load", {})
        self.sock.sendall(frame({"re": pending.number, "found": 1}))
        return self.connection.answer(pending, "load", 30.0)[0]["found"] == 1


@pytest.fixture
def make_peer():
    made = []

    def make(**values):
        made.append(Peer(**values))
        made[-1].connection.start(b"")
        return made[-1]

    yield make
    for peer in made:
        peer.gate.set()
        peer.sock.close()
        peer.connection.close(5.0)


@pytest.fixture
def peer(make_peer):
    return make_peer()


def test_reading_pauses_while_frames_wait_to_be_handled(peer):
    sender = threading.Thread(target=lambda: [peer.send(n, size=50_000) for n in range(400)])
    sender.start()
    wait_until(lambda: peer.connection._is_paused, "the pause")
    assert len(peer.connection._inward) < 100
    peer.gate.set()
    sender.join(30)
    wait_until(lambda: len(peer.heard) == 400, "all frames")
    assert peer.heard == list(range(400))


def test_answer_passes_frames_that_wait_to_be_handled(peer):
    peer.send(0)
    assert peer.answers()
    assert peer.heard == []


def test_pause_ends_even_if_all_frames_were_handled_before_it_began(peer):
    # Regression: the hub counted the waiting frames. Then another thread handled all of them, and the hub paused
    # forever.
    class Counted(type(peer.connection._inward)):
        def __len__(self):
            found = super().__len__()
            if found >= 64 and not peer.gate.is_set() and threading.current_thread().name == "paceline-links":
                peer.gate.set()
                threading.Event().wait(0.5)
            return found

    peer.connection._inward = Counted(peer.connection._inward)
    peer.send(*range(64))
    wait_until(lambda: len(peer.heard) == 64, "the first frames")
    peer.send(64)
    wait_until(lambda: len(peer.heard) == 65, "a frame after the pause")


def test_frames_that_a_gone_node_has_sent_during_a_pause_are_handled_before_its_requests_fail(peer):
    pending = peer.connection.requests.new(in_order=True)
    peer.send(*range(100), size=1000)
    peer.sock.sendall(frame({"re": pending.number, "found": 1}))
    peer.sock.close()
    wait_until(lambda: peer.connection._is_paused, "the pause")
    peer.gate.set()
    assert peer.connection.wait_for(pending, "flush", 30.0)[0]["found"] == 1
    assert peer.heard == list(range(100))
    wait_until(lambda: peer.connection.lost, "the loss")


def test_requests_of_a_gone_node_fail_even_if_its_frames_cannot_be_stored(peer, monkeypatch):
    monkeypatch.setattr(connection, "_FILING_S", 0.01)
    peer.send(0)
    pending = peer.connection.requests.new(in_order=True)
    peer.leave()
    with pytest.raises(LinkError, match="its agent is gone"):
        peer.connection.wait_for(pending, "flush", 30.0)


def test_failing_callback_of_a_lost_link_leaves_other_links_in_service(make_peer):
    def fail():
        raise OSError("the reader of the news is gone")

    other = make_peer()
    for _ in range(6):
        bad = make_peer(on_lost=fail)
        bad.leave()
        with pytest.raises(LinkError, match="its agent is gone"):
            bad.connection.wait_for(bad.connection.requests.new(), "load", 30.0)
    assert other.answers()


def test_link_is_lost_even_if_the_reason_cannot_be_found(peer, monkeypatch):
    def fail(self, wait_s):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Ends, "hear_rest", fail)
    pending = peer.connection.send("load", {})
    peer.leave()
    with pytest.raises(LinkError, match="peer: the link failed: OSError"):
        peer.connection.wait_for(pending, "load", 30.0)


def test_end_of_a_program_needs_no_thread_at_the_limit_of_threads(open_link, monkeypatch):
    link, other = open_link("one"), open_link("other")

    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    link.close()
    assert link._connection._ends.process.returncode is not None
    assert other.run(["echo", "here"]).stdout == b"here\n"


def test_writer_that_waits_for_room_stops_when_the_node_is_gone(peer):
    refused = threading.Event()

    def fill():
        try:
            while True:
                peer.connection.out.put({"op": "entry"}, b"x" * 100_000, kind=BULK, wait=True)
        except BrokenPipeError:
            refused.set()

    writer = threading.Thread(target=fill)
    writer.start()
    # The node reads nothing, so frames pile up until no further one has room.
    wait_until(lambda: peer.connection._wants_write and not peer.connection.out.has_room(BULK), "the full queue")
    peer.leave()
    assert refused.wait(60)
    writer.join()


def test_frames_arrive_whole_and_in_order_at_a_node_that_reads_slowly(peer):
    sent = [os.urandom(size) for size in (3_000_000, 0, 1, 70_000, 0, 500_000)]
    for number, data in enumerate(sent):
        peer.connection.out.put({"op": "entry", "number": number}, data)
    found, frames = [], Frames()
    while len(found) < len(sent):
        found += [one for one in frames.feed(peer.sock.recv(10_000)) if one[0]["op"] != "ping"]
    assert [(header["number"], data) for header, data in found] == list(enumerate(sent))


def test_endless_standard_error_does_not_delay_the_end(make_peer):
    ours, theirs = os.pipe()
    stop = threading.Event()

    def chatter():
        while not stop.wait(0.001):
            with contextlib.suppress(BrokenPipeError):
                os.write(theirs, b"debug\n")

    speaker = threading.Thread(target=chatter)
    speaker.start()
    try:
        peer = make_peer(stderr_fd=ours)
        peer.leave()
        wait_until(lambda: peer.connection.lost, "the loss")
        assert peer.connection.lost == "peer: its agent is gone: debug"
    finally:
        stop.set()
        speaker.join()
        os.close(theirs)


def test_ended_standard_error_is_closed_and_its_number_can_be_used_again(make_peer):
    ours, theirs = os.pipe()
    peer = make_peer(stderr_fd=ours)
    os.close(theirs)
    wait_until(lambda: peer.connection._ends.stderr_fd is None, "the end of standard error")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)
    assert peer.answers()


def test_hub_calls_work_that_another_thread_adds_at_any_moment():
    # Many rounds, so that work is added while the hub falls asleep, sleeps, and wakes up.
    for number in range(300):
        done = threading.Event()
        threading.Event().wait(number % 3 * 1e-5)
        hub().call(done.set)
        assert done.wait(30), f"round {number}"


def test_forked_process_has_its_own_hub():
    hub()
    pid = os.fork()
    if pid == 0:
        done = threading.Event()
        hub().call(done.set)
        os._exit(0 if done.wait(30) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_silent_link_gets_pings_and_lives_if_its_frames_were_not_read_yet(make_peer):
    # The thread of the hub is blocked for longer than the allowed silence. Meanwhile the node's bytes arrive, but
    # nothing reads them.
    peer = make_peer()
    held, go_on = threading.Event(), threading.Event()

    def hold():
        held.set()
        go_on.wait(30)
        peer.connection._heard -= 100
        peer.connection._tick()

    hub().call(hold)
    assert held.wait(30)
    peer.gate.set()
    peer.send(7)
    go_on.set()
    wait_until(lambda: peer.heard == [7], "the frame")
    assert peer.connection.lost is None
    hub().call(partial(setattr, peer.connection, "_heard", 0.0))
    hub().call(peer.connection._tick)
    wait_until(lambda: peer.connection.lost, "the loss")
    assert peer.connection.lost == "peer: nothing heard for 15 s."
