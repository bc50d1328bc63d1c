"""Spaces: nested, conditional, counted, given by their points."""

from __future__ import annotations

from typing import Any

import pytest

import paceline as pl
from paceline.errors import SweepError
from paceline.sweeps.space import Space, argument

NESTED = {
    "--lr": pl.loguniform(1e-4, 1e-1),
    "seed": 7,
    "model": {"layers": pl.choice(2, 4)},
    "optimizer": pl.choice({"--momentum": pl.choice(0.5, 0.9)}, {"beta": pl.choice(0.9, 0.99, 0.999)}, {}),
}


def test_space_supports_nested_and_conditional_parameters() -> None:
    space = Space(NESTED)

    def values(**raws: Any) -> dict[str, Any]:
        chosen = space.draw(lambda dimension: raws.get(dimension.key, 0))
        return space.values(chosen)

    assert values(**{"--lr": 0.01}) == {"--lr": 0.01, "seed": 7, "model.layers": 2, "--momentum": 0.5}
    assert values(**{"--lr": 0.01, "optimizer": 1, "optimizer[1]/optimizer.beta": 2}) == {
        "--lr": 0.01,
        "seed": 7,
        "model.layers": 2,
        "optimizer.beta": 0.999,
    }
    assert "optimizer.beta" not in values(**{"--lr": 0.01, "optimizer": 2})


def test_space_round_trips_through_json() -> None:
    space = Space(NESTED)
    again = Space.from_json(space.to_json())
    assert again == space
    assert again.to_json() == space.to_json()


def test_points_of_a_finite_search_space_are_counted_and_listed() -> None:
    space = Space({**NESTED, "--lr": pl.choice(0.1, 0.2)})
    points = [space.values(chosen) for chosen in space.grid()]
    assert len(points) == space.size == 2 * 1 * 2 * (2 + 3 + 1)
    assert len({tuple(sorted(point.items())) for point in points}) == space.size
    assert Space(NESTED).size is None
    quantised = Space({"x": pl.quniform(0, 1, 0.25), "n": pl.randint(3)})
    assert quantised.size == 15
    assert [quantised.values(chosen)["x"] for chosen in quantised.grid()][::3] == [0, 0.25, 0.5, 0.75, 1]


def test_points_given_with_or_without_dashes_are_converted_to_values_of_the_search_space() -> None:
    space = Space(NESTED)
    for point in (
        {"lr": 0.01, "model.layers": 4, "momentum": 0.9},
        {"--lr": 0.01, "--model.layers": 4, "optimizer.beta": 0.99, "seed": 7},
        {"--lr": 0.01, "model.layers": 4},
    ):
        values = space.values(space.chosen(point))
        assert {name.lstrip("-"): value for name, value in values.items()} == {
            "seed": 7,
            **{name.lstrip("-"): value for name, value in point.items()},
        }


def test_invalid_search_spaces_and_points_are_refused() -> None:
    wrong: dict[str, Any] = {
        "must be a mapping": lambda: Space([("lr", 1)]),  # type: ignore[arg-type]
        "with a name": lambda: Space({}),
        "not a name of a hyperparameter": lambda: Space({"a b": 1}),
        "given twice": lambda: Space({"lr": 1, "--lr": 2}),
        "has no end of values": lambda: Space({"lr": pl.uniform(0, 1)}).grid(),
        "has no model.layers": lambda: Space(NESTED).chosen({"lr": 0.01, "momentum": 0.5}),
        "lr: 5 is not in loguniform": lambda: Space(NESTED).chosen({"lr": 5, "model.layers": 2}),
        "which the space has not": lambda: Space(NESTED).chosen({"lr": 0.01, "model.layers": 2, "wd": 1}),
    }
    for message, make in wrong.items():
        with pytest.raises(SweepError) as caught:
            make()
        assert message in str(caught.value), message


def test_search_space_value_that_is_no_json_is_refused_by_name() -> None:
    for wrong in (float("nan"), pl.uniform, {1, 2}):
        with pytest.raises(SweepError, match=r"^model\.lr: .* can't be written as JSON"):
            Space({"model": {"lr": wrong}})


def test_parameter_name_without_a_dash_becomes_an_option_with_two_dashes() -> None:
    assert [argument(name) for name in ("lr", "--lr", "-b", "model.layers")] == ["--lr", "--lr", "-b", "--model.layers"]
