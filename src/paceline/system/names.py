"""Check names that become file names, and format names and counts for sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_BREAK = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def name_rule(also: str, longest: int, *, last: str | None = None) -> re.Pattern[str]:
    """Return a pattern for names that can be file names.

    A name begins with an ASCII letter or digit. ASCII letters, digits and characters of `also` may follow.

    longest: Maximum number of characters.
    last: Characters of `also` that may end a name; None allows all characters of `also`.
    """
    ends = re.escape(also if last is None else last)
    return re.compile(rf"[A-Za-z0-9](?:[A-Za-z0-9{re.escape(also)}]{{0,{longest - 2}}}[A-Za-z0-9{ends}])?")


def is_one_line(text: str) -> bool:
    """Return whether a text is a single line without control characters except tabs.

    Every separator of `str.splitlines` ends a line, because pip splits its files with this method.
    """
    return _BREAK.search(text) is None


def some(names: Sequence[str], most: int) -> str:
    """Return a text with at most `most` of the names: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def counted(number: int, noun: str, none: str = "0") -> str:
    """Return a number with its noun: "1 file", "3 files".

    none: Text for 0, such as "no".
    """
    return f"{number or none} {noun}{'' if number == 1 else 's'}"


def did_you_mean(given: str, known: Iterable[str], most: int = 1) -> str:
    """Return " Did you mean 'nccl'?" with the closest known names, or ""."""
    import difflib  # imported here because it is slow to load, and only a misspelled name needs it

    near = difflib.get_close_matches(given, list(known), n=most)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
