from __future__ import annotations

import math

import pytest

from paceline.sweeps.pictures.figure_data import Numbers, Options, axis_of, numbers_axis


def test_numeric_axis_places_values_linearly_or_logarithmically():
    assert [Numbers(0, 10).place(v) for v in (0, 2.5, 10, 12)] == [0, 0.25, 1, 1]
    assert [Numbers(1e-4, 1, True).place(v) for v in (1e-4, 1e-2, 1)] == pytest.approx([0, 0.5, 1])
    assert [Numbers(1e-4, 1, True).place(v) for v in (0, -1, math.nan, math.inf, True, "x", None)] == [None] * 7


def test_axis_ticks_are_round_numbers_or_the_ends_of_a_narrow_range():
    assert [text for _, text in Numbers(0.13, 0.87).ticks()] == ["0.2", "0.4", "0.6", "0.8"]
    assert [text for _, text in Numbers(1e-5, 1, True).ticks()] == ["1e-05", "0.0001", "0.001", "0.01", "0.1", "1"]
    assert [text for _, text in Numbers(2, 30, True).ticks()] == ["2", "5", "10", "20"]
    # The range lies between two round numbers, so the ticks are its ends.
    assert [text for _, text in Numbers(0.21, 0.24, True).ticks()] == ["0.21", "0.24"]
    assert [text for _, text in Numbers(-3e12, 4e12).ticks()] == ["-2e+12", "0", "2e+12", "4e+12"]


def test_axis_of_a_choice_parameter_has_a_tick_for_each_option():
    axis = axis_of(["a", [1, 2]], options=["a", None, [1, 2]])
    assert axis == Options(("a", "null", "[1, 2]"))
    assert [axis.place(v) for v in ("a", None, [1, 2], "b")] == [1 / 6, 0.5, 5 / 6, None]
    # If the options are many numbers, the axis is an axis of numbers.
    assert axis_of([3, 7], options=list(range(100))) == Numbers(3, 7)
    assert axis_of([3, "x"]) == Options(("3", "x"))


def test_axis_of_missing_equal_or_extreme_values_has_a_range_and_places_values_on_it():
    assert numbers_axis([]) == Numbers(0.0, 1.0)
    assert numbers_axis([2.0, 2.0]) == Numbers(1.0, 3.0)
    assert numbers_axis([0.0]).place(0.0) == 0.5
    assert numbers_axis([1e-3], is_log=True).place(1e-3) == pytest.approx(0.5)
    for axis in (numbers_axis([-1.7e308, 1.7e308]), numbers_axis([5e-324, 1e-323]), numbers_axis([0.1, 1e300])):
        assert axis.ticks()
        assert axis.place(0.5) is not None


def test_metric_over_many_orders_of_magnitude_gets_a_log_axis():
    assert numbers_axis([0.001, 5.0]).is_log
    assert not numbers_axis([0.001, 5.0], is_log=False).is_log
    assert not numbers_axis([-0.001, 5.0]).is_log
    assert not numbers_axis([0.5, 5.0]).is_log
