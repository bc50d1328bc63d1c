"""The fields of a run that queries, sort orders and columns name, such as `state`, `params.lr` or `metrics.acc.best`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from paceline.errors import QueryError
from paceline.runs.record import duration_text
from paceline.runs.search.facts import RunFacts, utc_of
from paceline.system.names import did_you_mean
from paceline.system.units import value_text

FieldKind: TypeAlias = Literal["text", "state", "number", "time", "duration", "truth", "any"]
#: Value of a run's field, or None if the run has no such value.
FieldValue: TypeAlias = "str | float | bool | None"

#: Prefix of a field -> its meaning, which the completion of queries shows.
GROUPS = {"metrics": "a metric's last value", "params": "a parameter", "tags": "a tag"}
#: Statistic of a metric -> its meaning.
STATISTICS = {
    "last": "the last number",
    "best": "the best number, by the metric's direction",
    "min": "the least number",
    "max": "the greatest number",
    "count": "how many numbers there are",
}
KEYWORDS = ("and", "or", "not", "in")
#: Characters that end a bare word of a query.
SPECIAL = r"\s()\"'`=!<>~,"
_BARE = re.compile(rf"[^{SPECIAL}]+")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\.(\w+))?|`([^`]*)`(?:\.(\w+))?', re.DOTALL)


@dataclass(frozen=True)
class RunField:
    """A field of a run: its name in queries, and its kind of values."""

    name: str
    kind: FieldKind
    get: Callable[[RunFacts], FieldValue] = field(compare=False, repr=False)
    #: Whether to sort the greatest value first, as for a metric whose goal is to maximize.
    is_descending: Callable[[RunFacts], bool] = field(compare=False, repr=False, default=lambda facts: False)


_PLAIN: tuple[tuple[str, FieldKind, str, Callable[[RunFacts], FieldValue]], ...] = (
    ("name", "text", "name, or id of a run without a name", lambda facts: facts.title),
    ("id", "text", "id", lambda facts: facts.run_id),
    ("experiment", "text", "experiment", lambda facts: facts.experiment),
    (
        "state",
        "state",
        "state, such as failed or hangs, or live for runs that have not ended",
        lambda facts: facts.state,
    ),
    ("kind", "text", "script, sweep, pipeline or interactive", lambda facts: facts.kind),
    ("created", "time", "time of the submission", lambda facts: facts.created),
    ("started", "time", "time of the start", lambda facts: facts.started),
    ("ended", "time", "time of the end", lambda facts: facts.ended),
    ("duration", "duration", "time from the start to the end, or to now", lambda facts: facts.duration_s),
    ("user", "text", "who submitted it", lambda facts: facts.user),
    ("target", "text", "compute target", lambda facts: facts.target),
    ("size", "text", "nodes and processes on each, such as 2x4", lambda facts: facts.size.replace("×", "x")),
    ("attempts", "number", "number of attempts", lambda facts: facts.attempts),
    ("script", "text", "script or module", lambda facts: facts.script),
    ("arguments", "text", "arguments of the script", lambda facts: facts.arguments),
    ("description", "text", "description", lambda facts: facts.description),
    ("why", "text", "reason for waiting or failing", lambda facts: facts.why),
    ("parent", "text", "id of the sweep or pipeline", lambda facts: facts.parent or ""),
    ("peak_memory", "number", "most GiB of memory of a process", lambda facts: facts.resources.get("memory_gib")),
    (
        "peak_gpu_memory",
        "number",
        "most GiB of GPU memory of a process",
        lambda facts: facts.resources.get("gpu_memory_gib"),
    ),
    ("cpu_time", "duration", "CPU seconds of all processes", lambda facts: facts.resources.get("cpu_s")),
    ("archived", "truth", "true or false", lambda facts: facts.is_archived),
)
FIELDS = {name: RunField(name, kind, get) for name, kind, _, get in _PLAIN}
#: Name of a field without a prefix -> its meaning.
MEANINGS = {name: meaning for name, _, meaning, _ in _PLAIN}
_ALIASES = {
    "status": "state",
    "run_id": "id",
    "took": "duration",
    "metric": "metrics",
    "param": "params",
    "tag": "tags",
}


def field_of(text: str, at: int = 0) -> RunField:
    """Return the field that a query calls `text`, such as `params.lr`.

    Args:
        text: The field's name in a query. A name with other characters is quoted: `metrics."val loss".best`.
        at: Position of `text` in the query, which the error reports.

    Raises:
        QueryError: There is no such field.

    Examples:
        >>> field_of('metrics."val loss".best').get(facts)
        0.25
    """
    first, dot, rest = text.partition(".")
    first = _ALIASES.get(first.lower(), first.lower())
    if not dot and first in FIELDS:
        return FIELDS[first]
    if first not in GROUPS or not dot:
        expected = "a field such as state, params.lr or metrics.acc"
        near = did_you_mean(first, GROUPS).replace("'?", f".{rest}'?") if dot else did_you_mean(text, FIELDS)
        raise QueryError(f"there is no field {text[:80]!r}.{near}", at, expected)
    name, statistic = _name_and_statistic(rest, has_statistic=first == "metrics")
    if not name:
        raise QueryError(f"{first}. lacks a name", at + len(text), f"the name of {GROUPS[first]}")
    if statistic not in STATISTICS:
        raise QueryError(f"{statistic!r} is no statistic of a metric", at, ", ".join(STATISTICS))
    shown = f"{first}.{quoted(name)}"
    match first, statistic:
        case "tags", _:
            return RunField(shown, "any", lambda facts: None if (tag := facts.tags.get(name, 0)) == 0 else tag or "")
        case "params", _:
            return RunField(shown, "any", lambda facts: facts.params.get(name))

    def get(facts: RunFacts) -> float | None:
        return facts.metrics.value(name, statistic)

    def is_descending(facts: RunFacts) -> bool:
        return statistic == "best" and facts.metrics.goal(name) == "maximize"

    return RunField(shown if statistic == "last" else f"{shown}.{statistic}", "number", get, is_descending)


def quoted(name: str) -> str:
    """Return a name as queries write it, quoted if ambiguous or with special characters."""
    if _BARE.fullmatch(name) and name.rpartition(".")[2] not in STATISTICS and name.lower() not in KEYWORDS:
        return name
    text = json.dumps(name, ensure_ascii=False)
    # Escape invisible characters and characters that reverse the writing direction: they could hide a part of the query.
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)


def unquoted(text: str) -> str:
    """Return a quoted text of a query without its quotes and escapes."""
    plain = re.sub(r"\\u([0-9a-fA-F]{4})|\\(.)", _escaped, text, flags=re.DOTALL)
    # Join the two \\u escapes of a surrogate pair into one character.
    return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _escaped(found: re.Match[str]) -> str:
    code, letter = found.groups()
    return chr(int(code, 16)) if code else {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}.get(letter, letter)


def split_fields(text: str) -> list[str]:
    """Return the fields of a comma-separated list. Quoted names may contain commas."""
    return re.findall(r'(?:[^,"`]|"(?:[^"\\]|\\.)*"|`[^`]*`|["`])+', text)


def cell_text(facts: RunFacts, of: RunField) -> str:
    """Return a field's value as tables show it; "-" for a missing value."""
    value = of.get(facts)
    match of.kind:
        case "time" if isinstance(value, float):
            return str(utc_of(value))[:16].replace("T", " ")
        case "duration" if isinstance(value, float):
            return duration_text(value)
        case "truth":
            return "yes" if value else "no"
    return value if isinstance(value, str) and value else value_text(value or None if isinstance(value, str) else value)


def _name_and_statistic(rest: str, *, has_statistic: bool) -> tuple[str, str]:
    if found := _QUOTED.fullmatch(rest):
        name = unquoted(found[1]) if found[1] is not None else found[3]
        return name, found[2] or found[4] or "last"
    name, dot, last = rest.rpartition(".")
    return (name, last) if has_statistic and dot and last in STATISTICS else (rest, "last")


def sorted_runs(runs: Iterable[RunFacts], order: str) -> list[RunFacts]:
    """Return the runs sorted by a field; runs without a value come last.

    Args:
        runs: The runs, newest first.
        order: A field, with "-" in front for the reverse order. The best value of a metric sorts the best run first. Any other
            field sorts the smallest value first.

    Raises:
        QueryError: There is no such field.

    Examples:
        >>> [facts.name for facts in sorted_runs(runs, "metrics.acc.best")]
        ['brave-otter-12', 'calm-fox-3']
    """
    by = field_of(order.removeprefix("-"), at=len(order) - len(order.removeprefix("-")))
    # If a field has only numbers, use plain numbers as sort keys, because sorting by tuples takes twice the time.
    key: Callable[[FieldValue], object] = _number_key if by.kind in ("number", "time", "duration") else _key
    runs = list(runs)
    keys = [key(by.get(facts)) for facts in runs]
    known = [at for at, one in enumerate(keys) if one is not None]
    is_reversed = bool(known) and by.is_descending(runs[known[0]])
    known.sort(key=cast("Any", keys.__getitem__), reverse=is_reversed != order.startswith("-"))
    return [runs[at] for at in known] + [runs[at] for at, one in enumerate(keys) if one is None]


def _number_key(value: FieldValue) -> FieldValue:
    return None if value != value else value  # noqa: PLR0124 - NaN alone differs from itself


def _key(value: FieldValue) -> tuple[int, float, str] | None:
    if isinstance(value, str):
        return (1, 0.0, value.lower()) if value else None
    return None if value is None or math.isnan(value) else (0, value, "")
