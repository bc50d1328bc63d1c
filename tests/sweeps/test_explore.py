"""Points beside others, kind by kind."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.sweeps.explore import explored
from paceline.sweeps.expressions import (
    choice,
    lognormal,
    loguniform,
    normal,
    qlognormal,
    quniform,
    randint,
    uniform,
)
from paceline.sweeps.space import Space


def beside(expression: Any, value: Any, factor: float) -> Any:
    """The value that comes of `value` with this factor, and nothing drawn anew."""
    space = Space({"x": expression})
    found = explored(space, space.chosen({"x": value}), random.Random(1), factors=[factor], resample=0)
    return space.values(found)["x"]


@pytest.mark.parametrize(
    ("expression", "value", "down", "up"),
    [
        (loguniform(1e-4, 1), 0.01, 0.008, 0.012),
        (loguniform(1e-4, 1), 1, 0.8, 1),
        (uniform(0, 1), 0.5, 0.4, 0.6),
        # Times a factor a range around 0 would never be left by half, so it is moved by a fifth of half its width.
        (uniform(-1, 1), 0.0, -0.2, 0.2),
        (uniform(-1, 1), -0.9, -1.0, -0.7),
        (randint(1, 100), 50, 40, 60),
        (randint(1, 5), 2, 1, 3),
        (randint(1, 5), 4, 3, 4),
        (randint(-10, 11), -3, -5, -1),
        (quniform(0, 1, 0.25), 0.5, 0.25, 0.75),
        (normal(10, 2), 10, 9.6, 10.4),
        (lognormal(0, 1), 1, 0.8, 1.2),
        (qlognormal(0, 1, 1), 3, 2, 4),
        (choice(32, 64, 128), 64, 32, 128),
        (choice(0.9, 0.5, 0.1), 0.5, 0.1, 0.9),
        (choice(32, 64), 64, 32, 64),
        (choice("only"), "only", "only", "only"),
        (3, 3, 3, 3),
    ],
    ids=str,
)
def test_each_kind_moves_in_its_way(expression: Any, value: Any, down: Any, up: Any) -> None:
    found = [beside(expression, value, factor) for factor in (0.8, 1.2)]
    assert found == ([pytest.approx(down), pytest.approx(up)] if isinstance(down, float) else [down, up])


def test_another_option_is_taken_of_those_without_an_order_each_as_likely() -> None:
    space = Space({"x": choice("relu", "gelu", "tanh")})
    found = [space.values(explored(space, {"x": 1}, random.Random(seed), resample=0))["x"] for seed in range(200)]
    assert set(found) == {"relu", "tanh"}
    assert 60 < found.count("relu") < 140


def test_what_is_drawn_anew_is_of_the_whole_space() -> None:
    space = Space({"x": uniform(0, 1)})
    found = [explored(space, {"x": 0.5}, random.Random(seed), resample=1)["x"] for seed in range(50)]
    assert len(set(found)) == 50
    assert min(found) < 0.2
    assert max(found) > 0.8


def test_a_branch_stays_and_its_values_move() -> None:
    space = Space({"opt": choice({"--momentum": uniform(0, 1)}, {"beta": uniform(0, 1)}), "lr": loguniform(0.01, 1)})
    before = space.chosen({"--momentum": 0.5, "lr": 0.1})
    for seed in range(20):
        after = space.values(explored(space, before, random.Random(seed)))
        assert set(after) == {"--momentum", "lr"}
    # Names with or without dashes; what is not named stays, and is drawn for all the same.
    only = explored(space, before, random.Random(3), mutate=["momentum"])
    every = explored(space, before, random.Random(3))
    assert only["lr"] == before["lr"] != every["lr"]
    (inner,) = set(only) - {"lr", "opt"}
    assert only[inner] == every[inner] != 0.5


def test_a_seed_says_what_comes_of_it() -> None:
    space = Space({"x": uniform(0, 1), "y": randint(1, 9)})
    one, two = (explored(space, {"x": 0.5, "y": 3}, random.Random(7)) for _ in range(2))
    assert one == two
