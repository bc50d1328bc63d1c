"""Truncation selection, against tables worked by hand."""

from __future__ import annotations

import pytest

from paceline.errors import SweepError
from paceline.sweeps.policies.truncation import TruncationSelection
from tests.sweeps.policies.curves import trials


def test_the_worst_per_cent_of_those_that_came_to_the_interval_are_stopped() -> None:
    curves = trials((0.1,), (0.2,), (0.3,), (0.4,), (0.5,))
    assert list(TruncationSelection(truncation_percentage=40).stops(curves, "maximize")) == [0, 1]
    assert list(TruncationSelection(truncation_percentage=39).stops(curves, "maximize")) == [0]
    assert list(TruncationSelection(truncation_percentage=40).stops(curves, "minimize")) == [3, 4]
    assert not TruncationSelection(truncation_percentage=19).stops(curves, "maximize")


def test_equal_values_at_the_edge_stay() -> None:
    curves = trials((0.1,), (0.1,), (0.1,), (0.1,))
    assert not TruncationSelection(truncation_percentage=50).stops(curves, "maximize")


def test_those_that_have_not_come_so_far_do_not_count() -> None:
    curves = trials((0.1, 0.1), (0.5,), (0.6,), (0.7,))
    assert not TruncationSelection(truncation_percentage=50, evaluation_interval=2).stops(curves, "maximize")


@pytest.mark.parametrize("wrong", [0, 100, 12.5, True])
def test_a_percentage_is_an_integer_from_1_to_99(wrong: object) -> None:
    with pytest.raises(SweepError, match="truncation_percentage"):
        TruncationSelection(truncation_percentage=wrong)  # type: ignore[arg-type]


def test_below_zero_and_minimized() -> None:
    curves = trials((-0.1,), (-0.2,), (-0.3,), (-0.4,), (-0.5,))
    assert list(TruncationSelection(truncation_percentage=40).stops(curves, "maximize")) == [3, 4]
    assert list(TruncationSelection(truncation_percentage=40).stops(curves, "minimize")) == [0, 1]


def test_what_counts_is_the_best_so_far_and_those_that_have_ended_count() -> None:
    # By their last values 2 would be the worst. Trial 0 has ended and is the worst of all: nobody is stopped in its place.
    curves = trials((0.1, 0.1), (0.3, 0.4), (0.5, 0.0), (0.6, 0.6), over=(0,))
    assert not TruncationSelection(truncation_percentage=25).stops(curves, "maximize")
    assert list(TruncationSelection(truncation_percentage=50).stops(curves, "maximize")) == [1]


def test_intervals_count_as_for_all_policies() -> None:
    curves = trials((0.1,) * 5, (0.9,) * 6, (0.8,) * 6, (0.7,) * 6)
    policy = TruncationSelection(truncation_percentage=50, evaluation_interval=2, delay_evaluation=5)
    assert list(policy.stops(curves, "maximize")) == [3]
