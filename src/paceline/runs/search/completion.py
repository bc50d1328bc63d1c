"""Completion of queries: fields, names, operators and values at the cursor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from paceline.errors import QueryError
from paceline.runs import states
from paceline.runs.search.facts import HANGS, RunFacts
from paceline.runs.search.fields import GROUPS, MEANINGS, STATISTICS, RunField, field_of, quoted
from paceline.runs.search.params import Names
from paceline.runs.search.query import LIVE, OPERATORS, QueryToken, tokens

#: Maximum number of suggestions to show, and maximum number of runs whose values are searched for suggestions.
MOST, _MOST_RUNS = 12, 20_000
_TIMES = {"-1d": "since a day ago", "-7d": "since a week ago", "today": "", "yesterday": "", "now": ""}


class Suggestion(NamedTuple):
    """A completion: text to insert from `start` to `end` of a query, and its meaning."""

    text: str
    start: int
    end: int
    hint: str


def complete(query: str, cursor: int, runs: Sequence[RunFacts]) -> list[Suggestion]:
    """Return suggestions for the word of a query at the cursor.

    Args:
        query: The text so far.
        cursor: Position in the text, from 0.
        runs: The runs whose names and values are suggested.

    Examples:
        >>> [one.text for one in complete("state = fa", 10, [])]
        ['Failed']
    """
    before = query[:cursor]
    # Include an open quote, which belongs to the word at the cursor.
    opened = re.search(r"""(?:^|[\s(,=<>~])((?:\w+\.)?["'`][^"'`]*)$""", before) if _is_open(before) else None
    begin = opened.start(1) if opened else cursor - len(re.search(r"[^\s(),=!<>~]*$", before)[0])  # type: ignore[index]
    try:
        earlier = tokens(before[:begin])[:-1]
    except QueryError:
        return []
    part = before[begin:].replace('"', "").replace("'", "").replace("`", "").lower()
    end = cursor + len(re.match(r"[^\s(),=!<>~]*", query[cursor:])[0])  # type: ignore[index]
    found = ((text, hint) for text, hint in _candidates(earlier, part, runs) if part in text.replace('"', "").lower())
    ranked = sorted(islice(found, 1000), key=lambda one: not one[0].replace('"', "").lower().startswith(part))
    return [Suggestion(text, begin, end, hint) for text, hint in ranked[:MOST]]


def _is_open(text: str) -> bool:
    return any(text.count(mark) % 2 for mark in "\"'`")


def _candidates(earlier: list[QueryToken], part: str, runs: Sequence[RunFacts]) -> Iterator[tuple[str, str]]:
    compared = _compared(earlier)
    if compared is not None:
        return _values(compared, runs)
    previous = earlier[-1:]
    follows_field = previous and previous[0].kind == "word" and _field(previous[0].text) is not None
    if follows_field and not (earlier[-2:-1] and earlier[-2].kind == "operator"):
        return iter([(operator, "") for operator in OPERATORS])
    return _fields(part, runs)


def _compared(earlier: list[QueryToken]) -> RunField | None:
    """Return the field compared with the value at the cursor (`state = fa`), or None."""
    place = len(earlier) - 1
    if place >= 1 and earlier[place].kind == "operator":
        return _field(earlier[place - 1].text)
    # If the word is in a list of values, such as `state in (failed, `, find the field (`state`) before the list.
    while place >= 0 and (earlier[place].text in ("(", ",") or earlier[place].kind in ("word", "string")):
        if earlier[place].text == "(" and place >= 2 and earlier[place - 1][:2] == ("keyword", "in"):
            return _field(earlier[place - 2 - (earlier[place - 2].text == "not")].text)
        place -= 1
    return None


def _field(text: str) -> RunField | None:
    try:
        return field_of(text)
    except QueryError:
        return None


def _values(field: RunField, runs: Sequence[RunFacts]) -> Iterator[tuple[str, str]]:
    match field.kind:
        case "state":
            yield from ((state, "") for state in (LIVE, *states.ALL, HANGS))
        case "time":
            yield from _TIMES.items()
        case "truth":
            yield from (("true", ""), ("false", ""))
        case "text" | "any":
            counts = Counter(str(value) for value in map(field.get, runs[:_MOST_RUNS]) if value not in (None, ""))
            yield from ((quoted(value), f"{count} runs") for value, count in counts.most_common(1000))


def _fields(part: str, runs: Sequence[RunFacts]) -> Iterator[tuple[str, str]]:
    """Yield (name, meaning) of the fields that a query may name.

    Names of metrics, parameters and tags are left out until the user has typed something, such as "lo" or "tags.".
    """
    yield from MEANINGS.items()
    yield from ((f"{group}.", meaning) for group, meaning in GROUPS.items())
    if part:
        names_by_group = _names(runs)
        for group, names in names_by_group.items():
            yield from ((f"{group}.{quoted(name)}", GROUPS[group]) for name in names)
        metric, dot, _ = part.removeprefix("metrics.").rpartition(".")
        known = {name.lower(): name for name in names_by_group["metrics"]}
        if part.startswith("metrics.") and dot and metric in known:
            yield from ((f"metrics.{quoted(known[metric])}.{name}", hint) for name, hint in STATISTICS.items())


def _names(runs: Iterable[RunFacts]) -> dict[str, list[str]]:
    tables: dict[Names, None] = {}
    params: dict[str, None] = {}
    tags: dict[str, None] = {}
    for facts in islice(runs, _MOST_RUNS):
        tables[facts.metrics.names] = None
        params |= dict.fromkeys(facts.params)
        tags |= dict.fromkeys(facts.tags)
    return {
        "metrics": list(dict.fromkeys(chain.from_iterable(names.at for names in tables))),
        "params": list(params),
        "tags": list(tags),
    }
