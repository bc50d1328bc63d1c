"""Names: the rule for those that people give and that become names of files; several of them, or their number, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_BREAK = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def name_rule(also: str, longest: int, *, last: str | None = None) -> re.Pattern[str]:
    """The rule for names that are names of files: ASCII letters and digits, and after the first of them those of `also`.

    longest: in characters. last: those of `also` with which a name may end; None: all.
    """
    ends = re.escape(also if last is None else last)
    return re.compile(rf"[A-Za-z0-9](?:[A-Za-z0-9{re.escape(also)}]{{0,{longest - 2}}}[A-Za-z0-9{ends}])?")


def is_one_line(text: str) -> bool:
    """Return whether a text may become a part of a line in a file that other programs read: no break, no control character.

    pip reads its files by `str.splitlines`, which breaks lines at more than line feeds. Tabs are blanks.
    """
    return _BREAK.search(text) is None


def some(names: Sequence[str], most: int) -> str:
    """So many of the names at most, and how many there are beside: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def counted(number: int, noun: str, none: str = "0") -> str:
    """So many of something: "1 file", "3 files". none: what stands for 0, such as "no"."""
    return f"{number or none} {noun}{'' if number == 1 else 's'}"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A sentence with the known name that is nearest to the given one, " Did you mean 'nccl'?"; empty where none is near."""
    import difflib  # slow to load, for a mistake alone

    near = difflib.get_close_matches(given, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
