"""Parse and format durations (`90s`, `1:00:00`), sizes (`500MB`, `1GiB`) and values."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from typing import Any

_FORMS = "a number of {unit} (90), units (90s, 5m, 1h30m, 2d) or hours:minutes:seconds (1:00:00, 2-00:00:00 with days)"
_WORDS = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds"}

_MOST_S = 100 * 365.25 * 86400  # the calendar ends in the year 9999
_UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
#: Other spellings of the units: words, and forms that other tools print.
_NAMES = {
    **dict.fromkeys(("week", "weeks"), "w"),
    **dict.fromkeys(("day", "days"), "d"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_CLOCK = re.compile(r"(?:([0-9]{1,12})-)?([0-9]{1,12})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?(\.[0-9]+)?")

_SIZE_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("I", 1024), ("IB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def seconds(given: str | float | dt.timedelta, *, unit: str = "s") -> float:
    """Convert a duration to seconds, from 0 to 100 years.

    Args:
        given: A number, a timedelta, or a text. A text is a number; numbers with descending units (`1h30m`, `2 d`); or a time
            in the form of sbatch's --time (https://slurm.schedmd.com/sbatch.html#OPT_time): `minutes:seconds`,
            `hours:minutes:seconds`, `days-hours`, `days-hours:minutes`, `days-hours:minutes:seconds`.
        unit: Unit of a number without a unit: w, d, h, m or s.

    Raises:
        ValueError: The text is not a duration; the message lists the forms.
    """
    if isinstance(given, dt.timedelta):
        found: float | None = given.total_seconds()
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        found = given * _UNITS[unit]
    else:
        found = _of_text(given.strip().lower(), unit) if isinstance(given, str) else None
    if found is None or not 0 <= found <= _MOST_S:
        raise ValueError(f"{str(given)!r} is not a duration. Write {forms(unit)}, at most 100 years.")
    return found


def forms(unit: str = "s") -> str:
    """Return a text about the accepted forms of durations. unit: of plain numbers."""
    return _FORMS.format(unit=_WORDS[unit])


def _of_text(text: str, unit: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text) * _UNITS[unit]
    return _of_clock(text) if ":" in text or "-" in text else _of_units(text)


def _of_units(text: str) -> float | None:
    total, at, smallest = 0.0, 0, math.inf
    while at < len(text):
        part = _PART.match(text, at)
        size = _UNITS.get(_NAMES.get(part[2], part[2])) if part else None
        if part is None or size is None or size >= smallest:
            return None
        total, at, smallest = total + float(part[1]) * size, part.end(), size
    return total if at else None


def _of_clock(text: str) -> float | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    days, *rest, fraction = match.groups()
    fields = [int(field) for field in rest if field is not None]
    # With days, as in 2-12:30, the first field after the days is hours. Without days, the last field is seconds.
    sizes = (3600, 60, 1) if days is not None else (3600, 60, 1)[3 - len(fields) :]
    if (
        any(field > 59 for field in fields[1:])
        or (days is not None and fields[0] > 23)
        or (fraction and sizes[len(fields) - 1] != 1)
    ):
        return None
    whole = sum(field * size for field, size in zip(fields, sizes, strict=False))
    return int(days or 0) * 86400 + whole + float(fraction or 0)


def is_number_text(text: str | bytes) -> bool:
    """Return whether `float` can parse the text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def value_text(value: Any) -> str:
    """Return a metric or parameter as text: six digits, "-" for None, containers as JSON."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else str(value)


def size_bytes(given: str) -> int:
    """Return a size in bytes: 1024, "500MB" (powers of 1,000) or "1GiB" (of 1,024).

    Raises:
        ValueError: The text is not a size; the message shows valid forms.
    """
    found = _SIZE.fullmatch(given)
    unit = _SIZE_UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{given!r} is not a size. Write it as 500MB, 2GB or 1GiB.")
    return int(float(found[1]) * unit)


def size_text(size: float) -> str:
    """Return a number of bytes as text, such as "3.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
