"""Sums of arrays that all ranks of a machine see, in place and elsewhere. Here ranks are threads."""

from __future__ import annotations

from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from paceline.collectives.fusion import Fusion, Part
from paceline.collectives.transport import SharedSegments
from tests.collectives.test_transport import cores, on_ranks, pytestmark

__all__ = ["cores", "pytestmark"]

JOINS = {"sum": numpy.add, "min": numpy.minimum, "max": numpy.maximum, "product": numpy.multiply}
#: An array of this many float32 values is longer than two of the shared-memory segments in these tests.
LENGTH = 2_500


def fusion_over(segments: SharedSegments | None) -> Fusion:
    transport: Any = SimpleNamespace(share_segments=lambda size: segments)
    fusion = Fusion(transport, 1 << 20)
    fusion.open()
    return fusion


def given(rank: int, dtype: str) -> Any:
    """A rank's array, with zeros of both signs and NaN where the type has them: there the order of the ranks counts."""
    array = numpy.random.default_rng(rank).integers(-3, 4, LENGTH).astype(dtype)
    if array.dtype.kind == "f":
        array[::5] = (0.0, -0.0)[rank % 2]
        array[7::500] = (numpy.nan, 1.0)[rank % 2]
    return array


# in_place says for each rank whether it wants the result in place. The ranks may differ.
@pytest.mark.parametrize("in_place", [(True,) * 4, (False, True, False, True), (True, False, True, False)])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fused_allreduce_of_several_arrays_equals_the_numpy_result_bitwise(
    ranks: int, dtype: str, in_place: tuple[bool, ...]
) -> None:
    def work(rank: int, segments: SharedSegments | None) -> dict[str, Any]:
        fusion, found = fusion_over(segments), {}
        for op in JOINS:
            arrays = [given(rank, dtype), given(rank + 10, dtype)[:100]]
            outs = arrays if in_place[rank] else [numpy.empty_like(array) for array in arrays]
            parts = [Part(array, out, 1.0, 1.0, 1) for array, out in zip(arrays, outs, strict=True)]
            fusion.allreduce(parts, op, dtype)
            found[op] = [out.tobytes() for out in outs]
        return found

    for found in on_ranks(ranks, work):
        for op, join in JOINS.items():
            whole = reduce(join, [given(rank, dtype) for rank in range(ranks)])
            second = reduce(join, [given(rank + 10, dtype)[:100] for rank in range(ranks)])
            assert found[op] == [whole.tobytes(), second.tobytes()], op


@pytest.mark.parametrize("factors", [(0.5, 1.0, 1), (1.0, 0.5, 1), (1.0, 1.0, 2), (1.0, 3.0, 1)])
def test_in_place_reduction_applies_scale_factors_once(factors: tuple[float, float, int]) -> None:
    def work(rank: int, segments: SharedSegments | None) -> Any:
        array = numpy.arange(LENGTH, dtype="float32") * (rank + 1)
        fusion_over(segments).allreduce([Part(array, array, *factors)], "sum", "float32")
        return array

    prescale, postscale, divisor = factors
    wanted = numpy.arange(LENGTH, dtype="float32") * 3 * prescale * postscale / divisor
    for found in on_ranks(2, work):
        assert (found == wanted).all()
