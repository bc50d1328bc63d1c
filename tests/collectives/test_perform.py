"""Which arrays ranks of one machine add up in memory that all see. Here ranks are threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from paceline.collectives.fusion import Part
from paceline.collectives.perform import Reducer
from paceline.collectives.transport import SharedSegments
from tests.collectives.test_transport import cores, on_ranks, pytestmark

__all__ = ["cores", "pytestmark"]

#: An array of this length is too long for shared memory with three ranks, because each rank would read three copies.
LONG_BYTES = 9 << 20


@pytest.mark.parametrize(("ranks", "calls_of_mpi"), [(2, 0), (3, 9)])
def test_two_ranks_with_shared_memory_sum_large_arrays_without_mpi(ranks: int, calls_of_mpi: int) -> None:
    def work(rank: int, segments: SharedSegments | None) -> tuple[bool, int, bool]:
        calls: list[Any] = []
        transport: Any = SimpleNamespace(
            size=ranks, share_segments=lambda size: segments, allreduce=lambda *given: calls.append(given)
        )
        reducer = Reducer(transport, 128 << 20)
        array = numpy.full(LONG_BYTES // 4, rank + 1, numpy.float32)
        reducer.allreduce([Part(array, array, 1.0, 1.0, 1)], "sum", "float32")
        return (
            bool((array == sum(range(1, ranks + 1))).all()),
            len(calls),
            reducer.polled_bytes(multiplied=False) > LONG_BYTES,
        )

    for is_summed, calls, is_polled in on_ranks(ranks, work):
        assert (calls, is_polled) == (calls_of_mpi, calls_of_mpi == 0)
        assert is_summed == is_polled
