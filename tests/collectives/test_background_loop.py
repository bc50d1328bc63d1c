"""The threads of one process set's loop, with transports that never answer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from paceline.collectives import CollectivesError, EngineSettings, ShutDownError
from paceline.collectives.background_loop import BackgroundLoop
from paceline.collectives.engine import Engine
from paceline.collectives.handle import Handle
from paceline.collectives.liveness import PeerPlace
from paceline.collectives.request import ALLREDUCE, CollectiveTask, Request
from paceline.collectives.transport import Alone
from paceline.collectives.world import RankedWorld


class DeadTransport:
    """The first of three ranks, of which the others say nothing. during_split: is called while a set is made."""

    rank = 0

    def __init__(self, size: int = 3) -> None:
        self.size = size
        self.reason: str | None = None
        self.during_split = lambda: None

    def send(self, data: bytes, rank: int) -> None:
        pass

    def receive(self) -> None:
        return None

    def split(self, members: Sequence[int], number: int) -> DeadTransport:
        self.during_split()
        return DeadTransport(len(members))

    def watched(self) -> dict[int, int]:
        return {}

    def abandon(self, reason: str) -> None:
        self.reason = reason

    def close(self) -> None:
        pass


def test_stall_check_does_not_fail_if_another_thread_removes_finished_operations() -> None:
    """It went through the table of operations while they were taken out, and the thread that watches ranks died of it."""
    loop: Any = BackgroundLoop(Alone(), (0,), 0, EngineSettings().chosen(1), lambda *_: None)
    failed: list[BaseException] = []
    is_over = threading.Event()

    def look() -> None:
        try:
            while not is_over.is_set():
                loop.overdue(1000.0)
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for turn in range(10):
            handles = [loop.submit(task(f"{turn}.{index}", loop)) for index in range(1000)]
            for handle in handles:
                handle.wait(60)
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        watcher.join()
        loop.leave()
    assert loop.join()
    assert not failed


def task(name: str, loop: BackgroundLoop) -> CollectiveTask:
    array = numpy.ones(1)
    request = Request(ALLREDUCE, name, ("float64",), ((1,),), "sum")
    return CollectiveTask(request, [array], [None], Handle(request.key, loop.waiter))


def test_operation_on_a_process_set_created_while_a_rank_dies_raises_shut_down_error() -> None:
    """Regression: when a rank died, existing process sets failed, but a process set that was being created waited
    forever."""
    transport: Any = DeadTransport()
    places = [PeerPlace(host="here", pid=1, namespace="")] * 3
    engine = Engine(RankedWorld(name="gloo", transport=transport, places=places), EngineSettings())
    try:
        transport.during_split = lambda: engine._sets.lost("rank 2 has died", 2)
        number = engine._sets.make((0, 1))
        with pytest.raises(ShutDownError, match="rank 2 has died"):
            engine.allreduce("a", numpy.ones(1), process_set=number).wait(120)
        made: Any = engine._sets.loops[number].transport
        assert made.reason == transport.reason == "rank 2 has died"
    finally:
        engine._sets.stop()


def test_pending_operation_raises_an_error_with_the_reason_when_a_rank_dies() -> None:
    transport: Any = DeadTransport()
    places = [PeerPlace(host="here", pid=1, namespace="")] * 3
    engine = Engine(RankedWorld(name="gloo", transport=transport, places=places), EngineSettings())
    try:
        handle = engine.allreduce("a", numpy.ones(1))
        waiter = threading.Timer(0.2, engine._sets.lost, ("rank 1 has died", 1))
        waiter.start()
        with pytest.raises(CollectivesError, match="rank 1 has died"):
            handle.wait(60)
        waiter.join()
    finally:
        engine._sets.stop()
