from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from paceline.remote.agent.send_queue import BULK, LIVE, URGENT, SendQueue
from paceline.remote.wire import CHUNK_BYTES, Frames


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            pass


def read_frames(fd: int, count: int) -> list:
    frames, found = Frames(), []
    while len(found) < count:
        found += frames.feed(os.read(fd, 1 << 16))
    return [header for header, _ in found]


def test_urgent_messages_are_sent_first_and_each_kind_stays_in_order(pipe):
    out = SendQueue(pipe[1], 60)
    for kind, name in ((BULK, "b1"), (LIVE, "l1"), (BULK, "b2"), (URGENT, "u"), (LIVE, "l2")):
        out.put({"name": name}, kind=kind)
    out.start()
    assert [header["name"] for header in read_frames(pipe[0], 5)] == ["u", "l1", "l2", "b1", "b2"]
    out.drop()
    out.join()


def test_idle_send_queue_sends_heartbeats(pipe):
    out = SendQueue(pipe[1], 0.01)
    out.start()
    assert read_frames(pipe[0], 2) == [{"op": "ping"}] * 2
    out.drop()
    out.join()


def test_blocked_send_returns_when_the_peer_has_disconnected(pipe):
    out = SendQueue(pipe[1], 60)
    for _ in range(5):
        out.put({}, bytes(CHUNK_BYTES), kind=BULK)
    assert (out.has_room(BULK), out.has_room(LIVE)) == (False, True)
    out.start()
    os.close(pipe[0])
    with pytest.raises(BrokenPipeError):
        _put_for_ever(out)
    out.put({"op": "dropped"})
    out.join()


def test_finishing_the_send_queue_writes_all_queued_frames(pipe):
    out = SendQueue(pipe[1], 60)
    out.put({"op": "last"})
    out.finish()
    out.start()
    assert read_frames(pipe[0], 1) == [{"op": "last"}]
    out.join()


def _put_for_ever(out: SendQueue) -> None:
    while True:
        out.put({}, bytes(CHUNK_BYTES), kind=BULK, wait=True)
