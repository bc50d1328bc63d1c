"""One simulated node in this process, with a clock of the test; pings are left out."""

from __future__ import annotations

import socket

import pytest

from paceline.remote.wire import Frames, frame
from paceline.testing.sim.faults import NodeBehavior
from paceline.testing.sim.node import DISK, Loop, SimNode


class Bench:
    """A node, the supervisor's end of its connection, and the time."""

    def __init__(self, folder, **behavior):
        self.time = 0.0
        self.loop = Loop(lambda: self.time)
        self.ours, theirs = socket.socketpair()
        for one in (self.ours, theirs):
            one.setblocking(False)
        values = {"latency_s": 0.0, "resent": 0.0, "start_s": 0.0} | behavior
        self.node = SimNode(
            3, theirs, self.loop, NodeBehavior(**values), seed=1, cores=8, folder=str(folder), silence_s=15.0
        )
        self.frames = Frames()

    def ask(self, **header):
        self.ours.send(frame({"id": 1, **header}))
        self.node.receive()

    def heard(self):
        self.loop.work_off()
        try:
            return [header for header, _ in self.frames.feed(self.ours.recv(1 << 20)) if header.get("op") != "ping"]
        except BlockingIOError:
            return []


@pytest.fixture
def make_bench(tmp_path):
    made = []

    def make(**behavior):
        made.append(Bench(tmp_path, **behavior))
        return made[-1]

    yield make
    for bench in made:
        bench.node.leave()
        bench.ours.close()


def test_simulated_agent_sends_hello_and_answers_requests(make_bench, tmp_path):
    bench = make_bench()
    (hello,) = bench.heard()
    assert (hello["op"], hello["host"], hello["cores"]) == ("hello", "sim3", 8)
    bench.ask(op="mkdirs", paths=[f"{DISK}/runs/x"])
    assert bench.heard() == [{"re": 1}]
    assert (tmp_path / "runs/x").is_dir()


def test_error_of_a_simulated_node_names_the_path_that_the_supervisor_sent(make_bench):
    bench = make_bench()
    bench.heard()
    bench.ask(op="list", path=f"{DISK}/nowhere")
    assert bench.heard() == [{"re": 1, "error": [2, "No such file or directory", f"{DISK}/nowhere"]}]


def test_simulated_messages_are_delayed_in_both_directions(make_bench):
    bench = make_bench(latency_s=1.0)
    bench.time = 5.0
    bench.heard()
    bench.ask(op="exists", path="/")
    assert bench.heard() == []
    bench.time = 6.6
    assert bench.heard() == []
    bench.time = 8.2
    assert bench.heard() == [{"re": 1, "ok": True}]


def test_lost_messages_arrive_later_and_in_order(make_bench):
    bench = make_bench(resent=0.5)
    bench.heard()
    bench.time = 1.0
    for number in range(20):
        bench.ask(op="exists", path="/", id=number)
    at_once = bench.heard()
    bench.time = 9.0
    found = bench.heard() + bench.heard()
    bench.time = 19.0
    assert [one["re"] for one in at_once + found + bench.heard() if "re" in one] == list(range(20))
    assert len(at_once) < 20


def test_silent_node_keeps_its_connection_and_answers_nothing(make_bench):
    bench = make_bench(silent_s=2.0)
    bench.heard()
    bench.time = 2.5
    bench.heard()
    bench.ask(op="exists", path="/")
    bench.time = 100.0
    assert bench.heard() == []


def test_killed_node_closes_its_connection(make_bench):
    bench = make_bench(killed_s=2.0)
    bench.heard()
    bench.time = 2.5
    bench.heard()
    assert bench.ours.recv(100) == b""


def test_simulated_full_disk_refuses_files(make_bench):
    bench = make_bench(full_s=2.0)
    bench.heard()
    bench.time = 2.5
    bench.heard()
    bench.ask(op="file", path=f"{DISK}/a", mode=0o600)
    assert bench.heard()[-1] == {"re": 1, "error": [28, "No space left on device", f"{DISK}/a"]}
    bench.ask(op="disk", path=f"{DISK}")
    assert bench.heard()[-1]["found"][0] == 0


def test_node_ends_when_the_supervisor_is_silent(make_bench):
    bench = make_bench()
    for second in range(0, 40, 3):
        bench.time = float(second)
        bench.loop.work_off()
    assert bench.node.is_over


@pytest.fixture
def clock():
    return [0.0]


def test_urgent_simulation_work_runs_before_other_work_that_was_due_earlier(clock):
    loop, done = Loop(lambda: clock[0]), []
    loop.after(0.0, lambda: done.append("file"))
    loop.after(0.5, lambda: done.append("ping"), urgent=True)
    clock[0] = 1.0
    loop.work_off()
    assert done == ["ping", "file"]


def test_simulation_loop_polls_connections_while_work_is_overdue(clock):
    loop, done = Loop(lambda: clock[0]), []

    def work():
        clock[0] += 0.04
        done.append(clock[0])

    for _ in range(10):
        loop.after(0.0, work)
    assert loop.work_off() == 0.0
    assert 0 < len(done) < 10
    while loop.work_off() is not None:
        pass
    assert len(done) == 10


def test_delayed_node_reads_pending_messages_before_it_treats_the_supervisor_as_lost(make_bench):
    bench = make_bench()
    bench.heard()
    bench.ours.send(frame({"op": "ping"}))
    bench.time = 100.0
    bench.heard()
    assert not bench.node.is_over
