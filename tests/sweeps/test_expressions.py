"""What a hyperparameter may be."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

import paceline as pl
from paceline.errors import SweepError
from paceline.sweeps.expressions import Fixed, from_json, parse

EVERY = [
    pl.choice("relu", "gelu", None, [1, 2]),
    pl.uniform(-1, 3),
    pl.quniform(0, 1, 0.1),
    pl.loguniform(1e-4, 1e-1),
    pl.qloguniform(1, 1000, 5),
    pl.normal(5, 2),
    pl.qnormal(5, 2, 1),
    pl.lognormal(0, 1),
    pl.qlognormal(2, 1, 0.5),
    pl.randint(10),
    pl.randint(-3, 4),
    pl.fixed("sgd"),
]


@pytest.mark.parametrize("expression", EVERY, ids=lambda one: str(one.to_json()))
def test_expression_is_equal_after_json_and_each_of_its_values_after_raw_conversion(expression: Any) -> None:
    assert from_json(expression.to_json()) == expression
    source = random.Random(3)
    for _ in range(200):
        raw = expression.raw_at(source.random())
        value = expression.value(raw)
        assert expression.value(expression.raw(value)) == pytest.approx(value) if isinstance(value, float) else True
        assert expression.value(expression.raw(value)) == value or isinstance(value, float)


def test_value_at_a_quantile_matches_the_distribution_of_the_expression() -> None:
    def at(expression: Any, quantile: float) -> Any:
        return expression.value(expression.raw_at(quantile))

    assert at(pl.uniform(2, 4), 0.25) == 2.5
    assert at(pl.loguniform(1e-4, 1e-2), 0.5) == pytest.approx(1e-3)
    assert at(pl.qloguniform(1, 100, 3), 0.5) == 9  # round(10 / 3) * 3
    assert at(pl.normal(5, 2), 0.5) == pytest.approx(5)
    assert at(pl.normal(0, 1), 0.8413447460685429) == pytest.approx(1)
    assert at(pl.lognormal(1, 1), 0.5) == pytest.approx(math.e)
    assert at(pl.quniform(0, 1, 0.1), 0.31) == 0.3
    assert [at(pl.randint(4), q) for q in (0.0, 0.24, 0.26, 0.999)] == [0, 0, 1, 3]
    assert [at(pl.choice("a", "b"), q) for q in (0.0, 0.49, 0.5, 0.999)] == ["a", "a", "b", "b"]


def test_choice_of_a_single_sequence_chooses_among_its_items() -> None:
    assert pl.choice([1, 2]) == pl.choice(1, 2) == pl.choice(range(1, 3)) == pl.choice((1, 2))
    assert pl.choice([1, 2], [3]).options == ([1, 2], [3])


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("loguniform(1e-4, 1e-1)", pl.loguniform(1e-4, 1e-1)),
        ("choice(32,64)", pl.choice(32, 64)),
        ("choice(relu, 'a, b', true, null, [1, 2])", pl.choice("relu", "a, b", True, None, [1, 2])),
        ("randint(1, 5)", pl.randint(1, 5)),
        (" quniform( 0 , 1 , 0.1 ) ", pl.quniform(0, 1, 0.1)),
        ("uniform(low=0, high=1)", pl.uniform(0, 1)),
        ("adam", Fixed("adam")),
        ("0.1", Fixed(0.1)),
        ("choice(1, inf, NaN)", pl.choice(1, "inf", "NaN")),
        ("outputs(1)/x", Fixed("outputs(1)/x")),
    ],
)
def test_command_line_text_is_parsed_as_an_expression(text: str, expression: Any) -> None:
    assert parse(text) == expression


def test_invalid_expression_raises_an_error_that_names_the_violated_rule() -> None:
    wrong = {
        "no options": pl.choice,
        "is not below": lambda: pl.uniform(1, 1),
        "has no logarithm": lambda: pl.loguniform(0, 1),
        "not a finite number": lambda: pl.uniform(0, math.inf),
        "'a' is not a finite": lambda: pl.uniform("a", 1),  # type: ignore[arg-type]
        "not above 0": lambda: pl.quniform(0, 1, 0),
        "the standard deviation": lambda: pl.normal(0, -1),
        "holds no integer": lambda: pl.randint(0),
        "is not an integer": lambda: pl.randint(1.5),  # type: ignore[arg-type]
        "can't be written as JSON": lambda: pl.choice({1, 2}, 3),
        "Make each a mapping": lambda: pl.choice({"a": 1}, 3),
        "there is no lognuniform": lambda: parse("lognuniform(1, 2)"),
        "missing 1 required": lambda: parse("uniform(1)"),
        "not one of the options": lambda: pl.choice(32, 64).raw(33),
        "is not in uniform(0, 1)": lambda: pl.uniform(0, 1).raw(2),
    }
    for message, make in wrong.items():
        with pytest.raises(SweepError) as caught:
            make()
        assert message in str(caught.value), message
