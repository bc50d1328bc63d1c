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
