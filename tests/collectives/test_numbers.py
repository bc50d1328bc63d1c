from __future__ import annotations

from importlib.util import find_spec

import pytest

from paceline.collectives import numbers
from tests.late import late

numpy = late("numpy")
pytestmark = pytest.mark.skipif(find_spec("numpy") is None, reason="needs numpy")


def test_bfloat16_is_rounded_to_the_nearest_and_nan_stays_nan():
    source = numpy.array([1.0, 1.00390625, 1.01171875, numpy.nan, numpy.inf, -0.0], numpy.float32)
    bits = numpy.empty(6, numpy.uint16)
    numbers.from_float32(source.copy(), bits, numbers.BFLOAT16)
    back = numpy.empty(6, numpy.float32)
    numbers.to_float32(bits, back, numbers.BFLOAT16)
    numpy.testing.assert_array_equal(back, [1.0, 1.0, 1.015625, numpy.nan, numpy.inf, -0.0])


def test_scaled_integers_are_truncated_towards_zero():
    array = numpy.array([3, -3, 4], numpy.int64)
    numbers.scale(array, 1.0, 2)
    assert array.tolist() == [1, -1, 2]
    array = numpy.array([1, 2, -2], numpy.int32)
    numbers.scale(array, 0.6)
    assert array.tolist() == [0, 1, -1]
