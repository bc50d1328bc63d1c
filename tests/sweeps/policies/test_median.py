"""Median stopping, against tables worked by hand."""

from __future__ import annotations

from paceline.sweeps.policies.median import MedianStopping
from tests.sweeps.policies.curves import trials


def test_the_best_so_far_is_held_against_the_median_of_the_others_averages() -> None:
    # Averages to interval 2 of the others of trial 3: 0.2, 0.4, 0.6; their median is 0.4.
    curves = trials((0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.39, 0.1), over=(0, 1, 2))
    found = MedianStopping().stops(curves, "maximize")
    assert list(found) == [3]
    assert "0.4" in found[3]
    assert not MedianStopping().stops(
        trials((0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.41, 0.1), over=(0, 1, 2)), "maximize"
    )


def test_minimized_metrics_go_the_other_way() -> None:
    assert list(MedianStopping().stops(trials((0.1,), (0.3,), (0.5,), over=(0, 1)), "minimize")) == [2]


def test_others_that_have_not_come_so_far_are_not_counted() -> None:
    assert not MedianStopping().stops(trials((0.9,), (0.1, 0.1), over=(0,)), "maximize")
    assert not MedianStopping().stops(trials((0.1,)), "maximize")


def test_others_without_a_number_have_no_opinion() -> None:
    nan = float("nan")
    assert not MedianStopping().stops(trials((nan, nan), (0.1, 0.1), over=(0,)), "maximize")


def test_intervals_count_as_for_all_policies() -> None:
    curves = trials((0.9,) * 9, (0.1,) * 4, over=(0,))
    assert not MedianStopping(evaluation_interval=3, delay_evaluation=4).stops(curves, "maximize")
    assert list(MedianStopping(evaluation_interval=2, delay_evaluation=4).stops(curves, "maximize")) == [1]


def test_below_zero_and_minimized() -> None:
    # Averages of the first two: -2 and -4; their median is -3. Going up, -3.5 is worse and -2.5 better.
    up = trials((-1.0, -3.0), (-3.0, -5.0), (-3.5, -9.0), (-2.5, -9.0), over=(0, 1))
    assert list(MedianStopping().stops([*up[:2], up[2]], "maximize")) == [2]
    assert not MedianStopping().stops([*up[:2], up[3]], "maximize")
    assert not MedianStopping().stops([*up[:2], up[2]], "minimize")
    down = trials((-1.0, -3.0), (-3.0, -5.0), (-2.5, 0.0), over=(0, 1))
    assert list(MedianStopping().stops(down, "minimize")) == [2]


def test_the_averages_are_those_up_to_the_interval_and_not_of_what_came_later() -> None:
    # At interval 1 the others stand at 0.1 and 0.2, whatever they came to.
    curves = trials((0.1, 0.9, 0.9), (0.2, 0.9, 0.9), (0.16,), over=(0, 1))
    assert not MedianStopping().stops(curves, "maximize")
    assert list(MedianStopping().stops([*curves[:2], *trials((), (), (0.14,))[2:]], "maximize")) == [2]
