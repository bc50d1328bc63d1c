"""Times of cron expressions: fields, time zones, the hours that the clock skips and repeats, and times that have passed."""

from __future__ import annotations

import datetime as dt
import itertools

import pytest

from paceline.errors import ScheduleError
from paceline.schedules import times

UTC = dt.timezone.utc


def utc(*parts: int) -> dt.datetime:
    return dt.datetime(*parts, tzinfo=UTC)  # type: ignore[misc,arg-type]


def first(expression: str, zone: str, since: dt.datetime, count: int) -> list[str]:
    found = itertools.islice(times.times_after(expression, zone, since), count)
    return [f"{time:%m-%d %H:%M}" for time in found]


def test_cron_expression_is_evaluated_in_its_time_zone() -> None:
    assert first("0 3 * * *", "UTC", utc(2026, 1, 1), 2) == ["01-01 03:00", "01-02 03:00"]
    assert first("0 3 * * *", "Asia/Tokyo", utc(2026, 1, 1), 2) == ["01-01 18:00", "01-02 18:00"]
    assert times.check("@daily", "UTC") == "0 0 * * *"
    assert times.check(" */15  8-18 * * mon-fri", "UTC") == "*/15 8-18 * * mon-fri"


def test_cron_time_skipped_by_daylight_saving_runs_after_the_gap_and_a_repeated_time_runs_once() -> None:
    # In Berlin the clock goes from 02:00 to 03:00 on 29 March 2026, and from 03:00 back to 02:00 on 25 October.
    assert first("30 2 * * *", "Europe/Berlin", utc(2026, 3, 28, 12), 2) == ["03-29 01:00", "03-30 00:30"]
    assert first("30 2 * * *", "Europe/Berlin", utc(2026, 10, 24, 12), 2) == ["10-25 00:30", "10-26 01:30"]
    # The search begins when 2:30 has already passed once and the repeated hour has begun.
    assert first("30 2 * * *", "Europe/Berlin", utc(2026, 10, 25, 1, 10), 1) == ["10-26 01:30"]
    hours = first("0 * * * *", "Europe/Berlin", utc(2026, 10, 24, 23, 30), 4)
    assert hours == ["10-25 00:00", "10-25 01:00", "10-25 02:00", "10-25 03:00"], "each hour that passes"


def test_due_returns_the_last_due_time_and_the_count_of_earlier_ones() -> None:
    found = times.due("0 3 * * *", "UTC", utc(2026, 1, 1), utc(2026, 1, 5, 4))

    assert found is not None
    assert (found.last, found.count) == (utc(2026, 1, 5, 3), 4)
    assert found.earlier == (utc(2026, 1, 1, 3), utc(2026, 1, 4, 3))
    assert times.due("0 3 * * *", "UTC", utc(2026, 1, 5, 3), utc(2026, 1, 6, 2)) is None
    once = times.due("0 3 * * *", "UTC", utc(2026, 1, 1), utc(2026, 1, 1, 3))
    assert once is not None
    assert (once.earlier, once.count) == (None, 0)


def test_count_of_missed_times_is_limited_and_the_latest_time_is_still_returned() -> None:
    found = times.due("* * * * *", "UTC", utc(2026, 1, 1), utc(2026, 3, 1, 0, 0, 30))

    assert found is not None
    assert (found.last, found.count) == (utc(2026, 3, 1), times.MOST - 1)
    assert found.earlier == (utc(2026, 1, 1, 0, 1), utc(2026, 2, 28, 23, 59))


@pytest.mark.parametrize(
    ("expression", "zone", "message"),
    [
        ("0 3 * *", "UTC", "five fields"),
        ("* 0 3 * * *", "UTC", "five fields"),
        ("@reboot", "UTC", "five fields"),
        ("61 3 * * *", "UTC", "'61 3 * * *' is not a cron expression: bad minute."),
        ("0 3 31 2 *", "UTC", "is not a cron expression: bad day-of-month"),
        ("0 3 * * *", "Mars/Base", "time zone 'Mars/Base' is not known here"),
        ("0 3 * * *", "../etc", "time zone '../etc' is not known here"),
    ],
)
def test_invalid_cron_expression_or_time_zone_is_refused_with_the_reason(
    expression: str, zone: str, message: str
) -> None:
    with pytest.raises(ScheduleError) as raised:
        times.check(expression, zone)

    assert message in str(raised.value)


def test_local_time_zone_is_read_from_tz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", ":America/New_York")
    assert times.local_zone() == "America/New_York"
    monkeypatch.setenv("TZ", "nowhere")
    assert times.check("@daily", times.local_zone()), "another source names the zone"
