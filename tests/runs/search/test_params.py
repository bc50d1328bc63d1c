"""Parameters from arguments, sweeps and trackers."""

from __future__ import annotations

import math

import pytest

from paceline.runs.search.params import arguments_by_name, packed, params_of, typed


def test_script_arguments_are_parsed_into_option_values() -> None:
    words = ("data", "--lr", "0.1", "--momentum=-0.5", "--shift", "-3", "-v", "--sizes", "1", "2", "--", "-")
    assert arguments_by_name(words) == {
        "argument 1": "data",
        "--lr": "0.1",
        "--momentum": "-0.5",
        "--shift": "-3",
        "-v": "",
        "--sizes": "1 2",
        "--": "-",
    }


def test_sweep_values_override_arguments_and_logged_parameters_override_sweep_values() -> None:
    found = params_of(
        ["data", "--lr", "0.1", "--amp", "--note="], {"lr": 0.2, "layers": [1, 2]}, {"layers": "7", "m": None}
    )
    assert found == {"argument 1": "data", "lr": 0.2, "amp": "true", "note": "true", "layers": 7, "m": "null"}


@pytest.mark.parametrize(
    "words", [["lr=0.1", "model.depth=18"], ["--set", "lr=0.1", "+model.depth=18"], ["x", "lr=0.1", "model.depth=18"]]
)
def test_name_value_arguments_become_parameters(words: list[str]) -> None:
    found = params_of(words, {}, {})
    assert (found["lr"], found["model.depth"]) == (0.1, 18)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-7", -7),
        ("1_000", "1_000"),
        ("٣", 3),
        ("adam", "adam"),
        ("inf", math.inf),
        ("9" * 5000, int("9" * 300)),
    ],
)
def test_numeric_text_becomes_a_number(text: str, value: float | str) -> None:
    assert typed(text) == value


def test_number_and_length_of_the_parameters_of_a_run_are_limited() -> None:
    found = params_of([f"--{n}{'n' * 999}={'v' * 999}" for n in range(3000)], {}, {})
    assert len(found) == 1000
    assert {len(name) for name in found} == {len(value) for value in found.values() if isinstance(value, str)} == {300}


def test_swept_value_replaces_the_argument_of_the_same_name() -> None:
    assert params_of(["--lr", "0.1"], {"--lr": 0.2}, {}) == {"lr": 0.2}


def test_equal_parameter_mappings_are_stored_once_unless_their_types_differ() -> None:
    assert packed({"team": "vision"}) is packed({"team": "vision"})
    assert [type(packed({"depth": value})["depth"]) for value in (1, 1.0)] == [int, float]
