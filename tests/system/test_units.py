"""Durations: what people, sbatch and other tools write."""

from __future__ import annotations

import datetime as dt

import pytest

from paceline.system.units import seconds, value_text

HOUR, DAY = 3600.0, 86400.0

TAKEN = {
    "90": 90.0,
    "0": 0.0,
    ".5": 0.5,
    "1.5": 1.5,
    "90s": 90.0,
    "5m": 300.0,
    "1h": HOUR,
    "1.5h": 1.5 * HOUR,
    "1h30m": 1.5 * HOUR,
    " 1h 30min ": 1.5 * HOUR,
    "2 H": 2 * HOUR,
    "2 days": 2 * DAY,
    "1w2d3h4m5.5s": 7 * DAY + 2 * DAY + 3 * HOUR + 245.5,
    # These are formats of sbatch's manual.
    "1:30": 90.0,
    "90:00": 1.5 * HOUR,
    "1:00:00": HOUR,
    "100:00:00": 100 * HOUR,
    "0:00:01.5": 1.5,
    "2-0": 2 * DAY,
    "2-12": 2.5 * DAY,
    "2-12:30": 2.5 * DAY + 1800,
    "2-00:00:00": 2 * DAY,
}

REFUSED = [
    *("", " ", "nan", "inf", "-1", "-1h", "1e3", "h", "1x", "1h30", "30 1h", "1m1h", "1h1h", "1,5h", "١h"),
    *(
        "1:60",
        "1:00:60",
        "1:2:3:4",
        ":30",
        "1:",
        "1-24",
        "1-",
        "99999999999d",
        f"{'9' * 400}-0",
        "9" * 400,
        "1-2:60",
        "2-12.5",
        "1h:30",
        "½h",
        "1:00:00:00",
    ),
]


@pytest.mark.promise("durations-read-table-says")
@pytest.mark.parametrize("text", TAKEN)
def test_duration_text_is_parsed(text: str) -> None:
    assert seconds(text) == TAKEN[text]


@pytest.mark.parametrize("text", REFUSED)
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration\. Write a number of seconds") as refused:
        seconds(text)

    assert repr(text) in str(refused.value)


def test_duration_number_without_a_unit_gets_the_default_unit() -> None:
    assert (seconds("2", unit="d"), seconds("2h", unit="d"), seconds(0.5, unit="d")) == (2 * DAY, 2 * HOUR, DAY / 2)


def test_timedelta_and_number_are_valid_durations() -> None:
    assert (seconds(dt.timedelta(hours=1)), seconds(3)) == (HOUR, 3.0)
    for wrong in (dt.timedelta(seconds=-1), float("nan"), True, None, ["1h"]):
        with pytest.raises(ValueError, match="is not a duration"):
            seconds(wrong)  # type: ignore[arg-type]


def test_parameter_and_metric_values_are_formatted_for_a_table():
    given = [None, 0.123456789, 1e-9, 3, True, "lr", [1, 0.5], {"a": None}]
    assert [value_text(value) for value in given] == [
        *("-", "0.123457", "1e-09", "3", "True", "lr", "[1, 0.5]", '{"a": null}'),
    ]
