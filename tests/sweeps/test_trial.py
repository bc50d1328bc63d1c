"""The Pareto front of trials with several metrics."""

from __future__ import annotations

import math
import random

import pytest

from paceline.sweeps.trial import Trial, front, ordered


def trial(number: int, *values: float) -> Trial:
    return Trial(number=number, run_id="s", curve=values[:1], further=tuple((value,) for value in values[1:]))


def test_pareto_front_holds_undominated_trials() -> None:
    trials = [
        trial(0, 0.9, 30),
        trial(1, 0.8, 10),
        trial(2, 0.8, 20),  # as accurate as trial 1, and slower
        trial(3, 0.7, 10),  # as quick as trial 1, and less accurate
        trial(4, 0.6, 5),
        trial(5, 0.95, math.nan),
        trial(6, 0.99),
        trial(7, 0.8, 10),  # equal to trial 1
    ]
    assert [one.number for one in front(trials, ("maximize", "minimize"))] == [0, 1, 7, 4]
    assert [one.number for one in ordered(trials, ("maximize", "minimize"))] == [0, 1, 7, 4, 2, 3, 5, 6]
    assert [one.number for one in front(trials[:5], ("maximize", "maximize"))] == [0]
    assert front([], ("maximize", "minimize")) == []


def test_pareto_front_uses_the_last_values_of_a_trial() -> None:
    moments = Trial(number=0, run_id="s", curve=(0.9, 0.5), further=((50, 10),))
    assert moments.last == (0.5, 10)
    assert [one.number for one in front([moments, trial(1, 0.6, 10)], ("maximize", "minimize"))] == [1]


@pytest.mark.promise("several-metrics-pareto-front-python")
def test_pareto_front_equals_its_definition_on_random_trials() -> None:
    source = random.Random(3)
    trials = [trial(n, *(source.randrange(8) for _ in range(3))) for n in range(200)]

    def beats(one: Trial, other: Trial) -> bool:
        a, b = one.last or (), other.last or ()
        pairs = [(-x, -y) if n == 1 else (x, y) for n, (x, y) in enumerate(zip(a, b, strict=True))]
        return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)

    expected = {one.number for one in trials if not any(beats(other, one) for other in trials)}
    assert {one.number for one in front(trials, ("minimize", "maximize", "minimize"))} == expected
