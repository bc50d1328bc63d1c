"""How all policies count, and that up and down are the same to them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.sweeps.policies.asha import ASHA, Hyperband
from paceline.sweeps.policies.bandit import Bandit
from paceline.sweeps.policies.median import MedianStopping
from paceline.sweeps.policies.policy import judged_at
from paceline.sweeps.policies.truncation import TruncationSelection
from tests.sweeps.policies.curves import trials


@pytest.mark.parametrize(
    ("evaluation_interval", "delay_evaluation", "judged"),
    [
        # values so far:       1     2     3     4     5     6     7     8
        (1, 0, (1, 2, 3, 4, 5, 6, 7, 8)),
        (2, 0, (None, 2, 2, 4, 4, 6, 6, 8)),
        (1, 5, (None, None, None, None, 5, 6, 7, 8)),
        # Not at 5, which is no multiple of 2, but at the first one after it.
        (2, 5, (None, None, None, None, None, 6, 6, 8)),
        (3, 6, (None, None, None, None, None, 6, 6, 6)),
        (10, 0, (None,) * 8),
    ],
    ids=str,
)
def test_intervals_count_as_the_sdk_s(
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
def test_what_is_minimized_is_judged_as_its_negative_is_that_is_maximized(policy: Any) -> None:
    stopped = 0
    for seed in range(50):
        source = random.Random(seed)
        curves = [tuple(source.uniform(-1, 1) for _ in range(source.randint(1, 6))) for _ in range(8)]
        up = policy.stops(trials(*curves), "maximize")
        down = policy.stops(trials(*(tuple(-value for value in curve) for curve in curves)), "minimize")
        assert list(up) == list(down)
        stopped += len(up)
        # Nobody is worse than itself: the best of all that came to its interval goes on.
        assert len(up) < 8
    assert stopped
