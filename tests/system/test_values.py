from __future__ import annotations

from paceline.system.values import value_text


def test_values_are_texts_of_a_table():
    given = [None, 0.123456789, 1e-9, 3, True, "lr", [1, 0.5], {"a": None}]
    assert [value_text(value) for value in given] == [
        *("-", "0.123457", "1e-09", "3", "True", "lr", "[1, 0.5]", '{"a": null}'),
    ]
