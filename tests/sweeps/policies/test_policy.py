"""How all policies count, and that up and down are the same to them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.errors import SweepError
from paceline.sweeps.policies.asha import ASHA, Hyperband
from paceline.sweeps.policies.policy import Bandit, MedianStopping, TruncationSelection, judged_at
from tests.sweeps.policies.curves import trials


@pytest.mark.promise("policies-count-azure-sdk-s")
@pytest.mark.parametrize(
    ("evaluation_interval", "delay_evaluation", "judged"),
    [
        # The last member has, for 1 to 8 values so far, the number of values by which the policy judges the trial.
        (1, 0, (1, 2, 3, 4, 5, 6, 7, 8)),
        (2, 0, (None, 2, 2, 4, 4, 6, 6, 8)),
        (1, 5, (None, None, None, None, 5, 6, 7, 8)),
        # The first judgement is at 6 values, because 5 is not a multiple of 2.
        (2, 5, (None, None, None, None, None, 6, 6, 8)),
        (3, 6, (None, None, None, None, None, 6, 6, 6)),
        (10, 0, (None,) * 8),
    ],
    ids=str,
)
def test_evaluation_intervals_are_counted_as_by_the_azure_sdk(
    evaluation_interval: int, delay_evaluation: int, judged: tuple[int | None, ...]
) -> None:
    found = [
        judged_at(trials((0.5,) * count)[0], evaluation_interval, delay_evaluation)
        for count in range(1, len(judged) + 1)
    ]
    assert tuple(found) == judged
    assert judged_at(trials(())[0], 1, 0) is None
    assert judged_at(trials((0.5,) * 8, over=(0,))[0], 1, 0) is None


@pytest.mark.parametrize(
    "policy",
    [
        *(
            Bandit(slack_factor=0.3),
            Bandit(slack_amount=0.2, evaluation_interval=2),
            MedianStopping(delay_evaluation=2),
        ),
        *(TruncationSelection(truncation_percentage=40), ASHA(first=1, eta=2), Hyperband(last=9)),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_each_policy_stops_the_same_trials_for_minimize_as_for_maximize_of_negated_values(policy: Any) -> None:
    stopped = 0
    for seed in range(50):
        source = random.Random(seed)
        curves = [tuple(source.uniform(-1, 1) for _ in range(source.randint(1, 6))) for _ in range(8)]
        up = policy.stops(trials(*curves), "maximize")
        down = policy.stops(trials(*(tuple(-value for value in curve) for curve in curves)), "minimize")
        assert list(up) == list(down)
        stopped += len(up)
        # The best of all trials continues, because no trial is worse than itself.
        assert len(up) < 8
    assert stopped


@pytest.mark.promise("policies-count-azure-sdk-s")
def test_median_policy_stops_a_trial_whose_best_value_is_below_the_median_of_averages() -> None:
    # Up to interval 2, the averages of trials 0 to 2 are 0.2, 0.4 and 0.6, and their median is 0.4. Trial 3 has 0.39 at best.
    curves = trials((0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.39, 0.1), over=(0, 1, 2))
    found = MedianStopping().stops(curves, "maximize")
    assert list(found) == [3]
    assert "0.4" in found[3]
    assert not MedianStopping().stops(
        trials((0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.41, 0.1), over=(0, 1, 2)), "maximize"
    )


def test_median_policy_stops_a_trial_with_a_higher_value_when_minimizing() -> None:
    assert list(MedianStopping().stops(trials((0.1,), (0.3,), (0.5,), over=(0, 1)), "minimize")) == [2]


def test_median_ignores_trials_that_have_not_reached_the_judged_interval() -> None:
    assert not MedianStopping().stops(trials((0.9,), (0.1, 0.1), over=(0,)), "maximize")
    assert not MedianStopping().stops(trials((0.1,)), "maximize")


def test_median_ignores_trials_that_logged_only_nan() -> None:
    nan = float("nan")
    assert not MedianStopping().stops(trials((nan, nan), (0.1, 0.1), over=(0,)), "maximize")


@pytest.mark.parametrize("values", [(1e308, 1e308), (float("inf"), float("-inf"))])
def test_median_policy_judges_values_whose_sum_is_not_finite(values: tuple[float, ...]) -> None:
    stopped = MedianStopping().stops(trials(values, (0.1, 0.1), over=(0,)), "maximize")
    assert bool(stopped) is (values == (1e308, 1e308))


def test_median_policy_evaluates_trials_at_the_configured_intervals() -> None:
    curves = trials((0.9,) * 9, (0.1,) * 4, over=(0,))
    assert not MedianStopping(evaluation_interval=3, delay_evaluation=4).stops(curves, "maximize")
    assert list(MedianStopping(evaluation_interval=2, delay_evaluation=4).stops(curves, "maximize")) == [1]


def test_median_policy_stops_the_worse_of_two_trials_with_negative_values_for_each_goal() -> None:
    # The averages of trials 0 and 1 are -2 and -4, and their median is -3. If maximized, -3.5 is worse and -2.5 is better.
    up = trials((-1.0, -3.0), (-3.0, -5.0), (-3.5, -9.0), (-2.5, -9.0), over=(0, 1))
    assert list(MedianStopping().stops([*up[:2], up[2]], "maximize")) == [2]
    assert not MedianStopping().stops([*up[:2], up[3]], "maximize")
    assert not MedianStopping().stops([*up[:2], up[2]], "minimize")
    down = trials((-1.0, -3.0), (-3.0, -5.0), (-2.5, 0.0), over=(0, 1))
    assert list(MedianStopping().stops(down, "minimize")) == [2]


def test_median_policy_averages_only_values_logged_up_to_the_judged_interval() -> None:
    # At interval 1, trials 0 and 1 have 0.1 and 0.2. Their later values do not count.
    curves = trials((0.1, 0.9, 0.9), (0.2, 0.9, 0.9), (0.16,), over=(0, 1))
    assert not MedianStopping().stops(curves, "maximize")
    assert list(MedianStopping().stops([*curves[:2], *trials((), (), (0.14,))[2:]], "maximize")) == [2]


@pytest.mark.promise("policies-count-azure-sdk-s")
def test_truncation_stops_the_worst_percentage_at_the_interval() -> None:
    curves = trials((0.1,), (0.2,), (0.3,), (0.4,), (0.5,))
    assert list(TruncationSelection(truncation_percentage=40).stops(curves, "maximize")) == [0, 1]
    assert list(TruncationSelection(truncation_percentage=39).stops(curves, "maximize")) == [0]
    assert list(TruncationSelection(truncation_percentage=40).stops(curves, "minimize")) == [3, 4]
    assert not TruncationSelection(truncation_percentage=19).stops(curves, "maximize")


def test_truncation_keeps_trials_tied_at_the_threshold() -> None:
    curves = trials((0.1,), (0.1,), (0.1,), (0.1,))
    assert not TruncationSelection(truncation_percentage=50).stops(curves, "maximize")


def test_truncation_policy_stops_no_trial_before_its_evaluation_interval() -> None:
    curves = trials((0.1, 0.1), (0.5,), (0.6,), (0.7,))
    assert not TruncationSelection(truncation_percentage=50, evaluation_interval=2).stops(curves, "maximize")


@pytest.mark.parametrize("wrong", [0, 100, 12.5, True])
def test_truncation_percentage_must_be_an_integer_from_1_to_99(wrong: object) -> None:
    with pytest.raises(SweepError, match="truncation_percentage"):
        TruncationSelection(truncation_percentage=wrong)  # type: ignore[arg-type]


def test_truncation_stops_the_worst_trials_with_negative_values_for_each_goal() -> None:
    curves = trials((-0.1,), (-0.2,), (-0.3,), (-0.4,), (-0.5,))
    assert list(TruncationSelection(truncation_percentage=40).stops(curves, "maximize")) == [3, 4]
    assert list(TruncationSelection(truncation_percentage=40).stops(curves, "minimize")) == [0, 1]


def test_truncation_compares_running_trials_with_the_best_values_of_ended_trials() -> None:
    # Trial 2 has the worst last value, but a good best value (0.5). Trial 0 has the worst best value but has already ended, so
    # 25 % stops no trial.
    curves = trials((0.1, 0.1), (0.3, 0.4), (0.5, 0.0), (0.6, 0.6), over=(0,))
    assert not TruncationSelection(truncation_percentage=25).stops(curves, "maximize")
    assert list(TruncationSelection(truncation_percentage=50).stops(curves, "maximize")) == [1]


def test_truncation_policy_evaluates_trials_at_the_configured_intervals() -> None:
    curves = trials((0.1,) * 5, (0.9,) * 6, (0.8,) * 6, (0.7,) * 6)
    policy = TruncationSelection(truncation_percentage=50, evaluation_interval=2, delay_evaluation=5)
    assert list(policy.stops(curves, "maximize")) == [3]


@pytest.mark.promise("policies-count-azure-sdk-s")
def test_bandit_bounds_equal_the_documented_example() -> None:
    # The best value is 0.8. With a slack factor of 0.2, the bound is 0.8 / 1.2 = 0.667.
    found = Bandit(slack_factor=0.2).stops(trials((0.8,), (0.66,), (0.67,)), "maximize")
    assert list(found) == [1]
    assert "below 0.6667" in found[1]
    assert list(Bandit(slack_amount=0.2).stops(trials((0.8,), (0.59,), (0.61,)), "maximize")) == [1]


def test_bandit_stops_trials_with_values_above_the_slack_bound_when_minimizing() -> None:
    assert list(Bandit(slack_factor=0.2).stops(trials((0.5,), (0.59,), (0.61,)), "minimize")) == [2]
    assert list(Bandit(slack_amount=0.2).stops(trials((0.5,), (0.69,), (0.71,)), "minimize")) == [2]


@pytest.mark.promise("policies-count-azure-sdk-s")
def test_bandit_bound_for_negative_values_is_worse_than_the_best() -> None:
    # If maximized, the best value is -1 and the bound is -1.2. A bound of -0.83 would stop the best trial too.
    assert list(Bandit(slack_factor=0.2).stops(trials((-1.0,), (-1.1,), (-1.3,)), "maximize")) == [2]
    assert list(Bandit(slack_factor=0.2).stops(trials((-1.0,), (-0.9,), (-0.8,)), "minimize")) == [2]


@pytest.mark.promise("policies-count-azure-sdk-s")
def test_trials_are_judged_at_multiples_of_the_interval_not_before_the_delay() -> None:
    curves = trials((0.9,) * 9, (0.1,) * 3, (0.1,) * 4, (0.1,) * 5, (0.1,) * 6)
    policy = Bandit(slack_factor=0.1, evaluation_interval=2, delay_evaluation=5)
    assert list(policy.stops(curves, "maximize")) == [4]


def test_bandit_compares_best_values_at_the_same_interval() -> None:
    # At interval 2, the best value of trial 0 is 0.5, whatever it reaches later. Trial 1 has reached 0.48 by then.
    assert not Bandit(slack_factor=0.1).stops(trials((0.1, 0.5, 0.9), (0.48, 0.2)), "maximize")


def test_bandit_stops_a_running_trial_after_another_trial_logs_a_better_value() -> None:
    policy = Bandit(slack_factor=0.1)
    assert not policy.stops(trials((0.3, 0.3), (0.31,)), "maximize")
    assert list(policy.stops(trials((0.3, 0.3), (0.31, 0.5)), "maximize")) == [0]


def test_ended_trials_and_nan_values_are_not_judged() -> None:
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
def test_invalid_policy_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SweepError, match="Bandit"):
        Bandit(**wrong)


@pytest.mark.parametrize(
    ("slack", "goal", "best", "stopped", "stays"),
    [
        ({"slack_factor": 0.25}, "maximize", 0.8, 0.63, 0.65),  # the bound is 0.8 / 1.25 = 0.64
        ({"slack_factor": 0.25}, "maximize", -0.8, -1.01, -0.99),  # the bound is -0.8 * 1.25 = -1
        ({"slack_factor": 0.25}, "minimize", 0.8, 1.01, 0.99),  # the bound is 0.8 * 1.25 = 1
        ({"slack_factor": 0.25}, "minimize", -0.8, -0.63, -0.65),  # the bound is -0.8 / 1.25 = -0.64
        ({"slack_amount": 0.25}, "maximize", -0.8, -1.06, -1.04),
        ({"slack_amount": 0.25}, "minimize", -0.8, -0.54, -0.56),
        ({"slack_factor": 0.25, "slack_amount": 0}, "maximize", 0.8, 0.63, 0.65),
        # If the best value is 0, a factor leaves no slack, so any worse trial is stopped.
        ({"slack_factor": 0.25}, "minimize", 0.0, 0.01, 0.0),
    ],
    ids=str,
)
def test_bandit_stops_only_the_trial_beyond_the_slack_bound_for_each_goal_and_kind_of_slack(
    slack: Any, goal: Any, best: float, stopped: float, stays: float
) -> None:
    assert list(Bandit(**slack).stops(trials((best,), (stopped,), (stays,)), goal)) == [1]
