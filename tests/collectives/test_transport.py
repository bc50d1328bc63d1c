"""Memory that all ranks of a machine see. Here ranks are threads, which meet as processes do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

from paceline.collectives.engine import Engine
from paceline.collectives.liveness import PeerPlace
from paceline.collectives.settings import EngineSettings
from paceline.collectives.transport import MOST_RANKS, Alone, SharedSegments, share_segments
from paceline.collectives.world import RankedWorld
from paceline.system import processes

FLOAT = numpy.dtype("float32")
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "core_count", lambda: MOST_RANKS)


def on_ranks(
    ranks: int, work: Callable[[int, SharedSegments | None], Any], tell: Callable[[Any], Any] = lambda one: one
) -> Any:
    """What `work` gives on each rank. tell: what of what a rank gathers reaches the others."""
    barrier, values = threading.Barrier(ranks, timeout=90), [None] * ranks

    def run(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            values[rank] = tell(value)
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        return work(rank, share_segments(rank, ranks, gather, barrier.wait, 4096))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_reads_the_shared_memory_segments_of_all_ranks_in_rank_order(ranks: int) -> None:
    def work(rank: int, segments: SharedSegments | None) -> list[list[float]]:
        assert segments is not None
        segments.fill(FLOAT)[:2] = rank, rank + 0.5
        return [list(array[:2]) for array in segments.meet(FLOAT)]

    assert on_ranks(ranks, work) == [[[rank, rank + 0.5] for rank in range(ranks)]] * ranks


def test_shared_memory_segment_is_not_overwritten_while_another_rank_reads_it() -> None:
    may_read = threading.Event()

    def work(rank: int, segments: SharedSegments | None) -> list[float]:
        assert segments is not None
        read = []
        for turn in range(3):
            segments.fill(FLOAT)[:] = 10 * rank + turn
            arrays = segments.meet(FLOAT)
            if rank == 0:
                # Rank 0 fills the next array before rank 1 has read this one. After that it must wait for rank 1.
                segments.fill(FLOAT)[:] = -1
                may_read.set()
            assert may_read.wait(120)
            read.append(float(arrays[0][0]))
        return read

    assert on_ranks(2, work) == [[0, 1, 2]] * 2


def test_shared_memory_is_not_used_if_a_rank_cannot_open_all_segments(tmp_path: Any) -> None:
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    opened = os.open(fifo, os.O_RDWR)
    for wrong in (other, opened, 10_000):

        def tell(value: Any, wrong: int = wrong) -> Any:
            return (value[0], value[1], wrong) if isinstance(value, tuple) else value

        assert on_ranks(2, lambda _, segments: segments, tell) == [None, None]
    os.close(other)
    os.close(opened)


def test_shared_memory_segment_without_the_token_sent_by_its_rank_is_refused() -> None:
    def tell(value: Any) -> Any:
        return (b"\0" * 16, *value[1:]) if isinstance(value, tuple) else value

    assert on_ranks(2, lambda _, segments: segments, tell) == [None, None]


def test_shared_memory_is_not_used_if_there_are_more_ranks_than_cpu_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "core_count", lambda: 1)
    assert on_ranks(2, lambda _, segments: segments) == [None, None]


def test_shared_memory_is_not_used_if_the_number_of_ranks_exceeds_the_shared_memory_limit() -> None:
    assert share_segments(0, MOST_RANKS + 1, lambda value: [value], lambda: None, 4096) is None


def test_shared_memory_leaves_no_open_files() -> None:
    before = set(os.listdir("/proc/self/fd"))
    on_ranks(2, lambda _, segments: None)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("length", [4, 1 << 19])
def test_collective_operations_on_a_single_rank_return_the_scaled_input(length: int) -> None:
    places = [PeerPlace(host="here", pid=1, namespace="")]
    engine = Engine(RankedWorld(name="alone", transport=Alone(), places=places), EngineSettings())
    array = numpy.arange(length, dtype=numpy.float32)
    try:
        numpy.testing.assert_array_equal(engine.allreduce("a", array, op="average", prescale=2.0).wait(), 2 * array)
        numpy.testing.assert_array_equal(engine.allreduce("b", array, op="adasum", postscale=0.5).wait(), array / 2)
        numpy.testing.assert_array_equal(engine.allreduce("c", array, op="max").wait(), array)
        numpy.testing.assert_array_equal(engine.reducescatter("d", array, prescale=2.0).wait(), 2 * array)
        numpy.testing.assert_array_equal(engine.allgather("e", array).wait(), array)
        numpy.testing.assert_array_equal(engine.broadcast("f", array, root=0).wait(), array)
        rows, counts = engine.alltoall("g", array, splits=[3]).wait()
        assert (rows.tolist(), counts) == ([0.0, 1.0, 2.0], (3,))
        assert engine.barrier().wait() is None
        assert engine.join().wait() == 0
    finally:
        engine._sets.stop()
