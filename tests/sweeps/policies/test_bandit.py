"""Bandit, against tables worked by hand from the SDK's rules."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import SweepError
from paceline.sweeps.policies.bandit import Bandit
from tests.sweeps.policies.curves import trials


def test_the_documented_example() -> None:
    # The best is 0.8; with a factor of 0.2 the bound is 0.8 / 1.2 = 0.667.
    found = Bandit(slack_factor=0.2).stops(trials((0.8,), (0.66,), (0.67,)), "maximize")
    assert list(found) == [1]
    assert "below 0.6667" in found[1]
    assert list(Bandit(slack_amount=0.2).stops(trials((0.8,), (0.59,), (0.61,)), "maximize")) == [1]


def test_minimized_metrics_go_the_other_way() -> None:
    assert list(Bandit(slack_factor=0.2).stops(trials((0.5,), (0.59,), (0.61,)), "minimize")) == [2]
    assert list(Bandit(slack_amount=0.2).stops(trials((0.5,), (0.69,), (0.71,)), "minimize")) == [2]


def test_below_zero_the_bound_is_still_worse_than_the_best() -> None:
    # Maximized, the best is -1: the bound is -1.2, not -0.83, which would stop the best one too.
    assert list(Bandit(slack_factor=0.2).stops(trials((-1.0,), (-1.1,), (-1.3,)), "maximize")) == [2]
    assert list(Bandit(slack_factor=0.2).stops(trials((-1.0,), (-0.9,), (-0.8,)), "minimize")) == [2]


def test_trials_are_judged_at_multiples_of_the_interval_not_before_the_delay() -> None:
    curves = trials((0.9,) * 9, (0.1,) * 3, (0.1,) * 4, (0.1,) * 5, (0.1,) * 6)
    policy = Bandit(slack_factor=0.1, evaluation_interval=2, delay_evaluation=5)
    assert list(policy.stops(curves, "maximize")) == [4]


def test_the_best_of_all_is_that_at_the_same_interval_and_each_counts_with_its_best() -> None:
    # At interval 2 the leader has had 0.5, however good it becomes; trial 1 has been as good once.
    assert not Bandit(slack_factor=0.1).stops(trials((0.1, 0.5, 0.9), (0.48, 0.2)), "maximize")


def test_what_runs_is_judged_again_when_a_better_curve_comes() -> None:
    policy = Bandit(slack_factor=0.1)
    assert not policy.stops(trials((0.3, 0.3), (0.31,)), "maximize")
    assert list(policy.stops(trials((0.3, 0.3), (0.31, 0.5)), "maximize")) == [0]


def test_what_is_over_and_what_is_no_number_is_not_judged() -> None:
    nan = float("nan")
    curves = trials((0.9, 0.9), (0.1, 0.1), (nan, nan), (nan, 0.1), over=(1,))
    assert list(Bandit(slack_factor=0.1).stops(curves, "maximize")) == [3]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"slack_factor": 0.1, "slack_amount": 0.1},
        {"slack_factor": 0},
        {"slack_factor": -1},
        {"slack_factor": 0.1, "evaluation_interval": 0},
        {"slack_factor": 0.1, "delay_evaluation": 1.5},
    ],
    ids=str,
)
def test_wrong_parameters_are_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(SweepError, match="Bandit"):
        Bandit(**wrong)


@pytest.mark.parametrize(
    ("slack", "goal", "best", "stopped", "stays"),
    [
        ({"slack_factor": 0.25}, "maximize", 0.8, 0.63, 0.65),  # 0.8 / 1.25 = 0.64
        ({"slack_factor": 0.25}, "maximize", -0.8, -1.01, -0.99),  # -0.8 * 1.25 = -1
        ({"slack_factor": 0.25}, "minimize", 0.8, 1.01, 0.99),  # 0.8 * 1.25 = 1
        ({"slack_factor": 0.25}, "minimize", -0.8, -0.63, -0.65),  # -0.8 / 1.25 = -0.64
        ({"slack_amount": 0.25}, "maximize", -0.8, -1.06, -1.04),
        ({"slack_amount": 0.25}, "minimize", -0.8, -0.54, -0.56),
        ({"slack_factor": 0.25, "slack_amount": 0}, "maximize", 0.8, 0.63, 0.65),
        # A ratio of nothing is nothing: what is not as good is stopped.
        ({"slack_factor": 0.25}, "minimize", 0.0, 0.01, 0.0),
    ],
    ids=str,
)
def test_bounds_worked_by_hand(slack: Any, goal: Any, best: float, stopped: float, stays: float) -> None:
    assert list(Bandit(**slack).stops(trials((best,), (stopped,), (stays,)), goal)) == [1]
