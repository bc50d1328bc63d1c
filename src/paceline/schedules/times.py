"""Times of cron expressions in a time zone, with the rules of Debian's cron (https://github.com/cuu508/cronsim).

Daylight saving: a time in the skipped hour is moved to right after it, and a time in the repeated hour occurs once.
Expressions with `*` in the field of minutes or hours ignore the change: they count elapsed time.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ScheduleError

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_SHORT = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
#: Maximum number of missed times to count after a machine was off; a larger number is reported as this number.
MOST = 20_000


@dataclass(frozen=True)
class Due:
    """The times at which a schedule was due since its last check.

    Attributes:
        last: The latest due time.
        earlier: The first and the last due time before `last`, or None.
        count: The number of due times before `last`, at most 20,000 (`MOST`).
    """

    last: dt.datetime
    earlier: tuple[dt.datetime, dt.datetime] | None
    count: int


def is_expression(word: str) -> bool:
    """Return whether a word is a cron expression."""
    return word.startswith("@") or len(word.split()) > 1


def check(expression: str, zone: str) -> str:
    """Return the five fields of a cron expression, such as "0 3 * * *".

    Raises:
        ScheduleError: The expression or the time zone is wrong, or the expression has no time in the next 50 years.
    """
    fields = _SHORT.get(expression.strip().lower(), expression)
    if len(fields.split()) != 5:
        raise ScheduleError(
            f"{expression!r} is not a cron expression: five fields, the minute, hour, day of the month, month and day of the "
            f"week, such as '0 3 * * *' for each day at 03:00, or one of {', '.join(_SHORT)}."
        )
    from cronsim import CronSimError

    try:
        next(times_after(fields, zone, dt.datetime.now(dt.timezone.utc)))
    except CronSimError as error:
        raise ScheduleError(
            f"{expression!r} is not a cron expression: {str(error)[:1].lower()}{str(error)[1:]}. `man 5 crontab` has the rules."
        ) from None
    except StopIteration:
        raise ScheduleError(f"{expression!r} has no time in the next 50 years. Correct its day or month.") from None
    return " ".join(fields.split())


def times_after(expression: str, zone: str, since: dt.datetime) -> Iterator[dt.datetime]:
    """Yield the times of a cron expression after `since`, in UTC."""
    from cronsim import CronSim  # imported here because few commands need it

    for time in CronSim(expression, since.astimezone(_zone(zone))):
        # cronsim compares local times: in the hour that repeats when clocks go back, its first result may be before `since`.
        if (found := time.astimezone(dt.timezone.utc)) > since:
            yield found


def next_time(expression: str, zone: str, since: dt.datetime) -> dt.datetime | None:
    """Return a cron expression's first time after `since`, in UTC, or None."""
    return next(times_after(expression, zone, since), None)


def due(expression: str, zone: str, since: dt.datetime, now: dt.datetime) -> Due | None:
    """Return a cron expression's times after `since` and up to `now`, or None."""
    found: list[dt.datetime] = []
    count = 0
    for time in times_after(expression, zone, since):
        if time > now or count == MOST:
            break
        # Keep only the first time and the last two times, because the result needs no others.
        found = [*found[:1], *found[1:][-1:], time]
        count += 1
    if count == MOST:
        # The machine was off for very long, so stop counting at `MOST`, and search only the last day for the latest time.
        for time in times_after(expression, zone, max(found[-1], now - dt.timedelta(days=1))):
            if time > now:
                break
            found = [found[0], found[-1], time]
    return Due(found[-1], (found[0], found[-2]) if len(found) > 1 else None, count - 1) if found else None


def shown(time: dt.datetime, zone: str) -> str:
    """Return a time as text, such as "2026-11-29 03:00 CET"."""
    return f"{time.astimezone(_zone(zone)):%Y-%m-%d %H:%M %Z}"


def local_zone() -> str:
    """Return the name of this machine's time zone."""
    names = [os.environ.get("TZ", "").removeprefix(":")]
    names.append(os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2])
    try:
        with open("/etc/timezone", encoding="ascii", errors="replace") as file:
            names.append(file.read().strip())
    except OSError:
        pass
    for name in filter(None, names):
        try:
            return _zone(name).key
        except ScheduleError:
            continue
    return "UTC"


def _zone(name: str) -> ZoneInfo:
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # imported here because few commands need it

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ScheduleError(
            f"time zone {name!r} is not known here. Write a name such as Europe/Berlin or UTC; if the machine has no time "
            "zones: pip install tzdata."
        ) from None
