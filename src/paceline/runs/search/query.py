"""The query language of runs: `resnet metrics.acc > 0.9 and params.lr < 1e-3 and state = failed and created > -7d`.

    query       any ("or" any)*
    any         each (["and"] each)*
    each        "not" each | "(" query ")" | comparison | word
    comparison  FIELD (= | != | < | <= | > | >= | ~ | !~) VALUE
                FIELD ["not"] "in" "(" VALUE ("," VALUE)* ")"
    word        a text that name, id, experiment, user or tags contain; or tags.NAME: the run has this tag

A missing value passes only `!=`, `!~` and `not in`. `docs/runs.md` describes the language for users.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import eq, ge, gt, le, lt
from typing import Literal, NamedTuple, TypeAlias, cast

from paceline.errors import QueryError
from paceline.runs import states
from paceline.runs.search.facts import HANGS, RunFacts
from paceline.runs.search.fields import GROUPS, KEYWORDS, SPECIAL, FieldValue, RunField, field_of, quoted, unquoted
from paceline.runs.search.params import typed
from paceline.system import units
from paceline.system.names import did_you_mean

Predicate: TypeAlias = "Callable[[RunFacts], bool]"
Operator = Literal["=", "!=", "<", "<=", ">", ">=", "~", "!~", "in", "not in"]

#: Maximum number of characters in a query, and maximum depth of its nested parentheses.
LONGEST, DEEPEST = 10_000, 50
#: State in a query that stands for all states of runs that have not ended.
LIVE = "live"
OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "~", "!~", "in", "not in")
_TOKEN = re.compile(
    rf"""(?P<space>\s+)|(?P<sign>[(),])|(?P<operator>!=|!~|<=|>=|==?|[<>~])
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<word>(?:[^{SPECIAL}]|(?<=\.)(?:"(?:[^"\\]|\\.)*"|`[^`]*`))+)""",
    re.VERBOSE | re.DOTALL,
)


class QueryToken(NamedTuple):
    """A token of a query, from `at` to `end` in the text.

    `kind` is "sign", "operator", "string", "word", "keyword" or "end". `text` lacks a string's quotes.
    """

    kind: str
    text: str
    at: int
    end: int


@dataclass(frozen=True)
class Word:
    """A query that matches runs whose name, id, experiment, user or tags contain a text."""

    text: str

    def __str__(self) -> str:
        return quoted(self.text)

    def test(self, now: float) -> Predicate:
        word = self.text.lower()

        def test(facts: RunFacts) -> bool:
            return word in f"{facts.name} {facts.run_id} {facts.experiment} {facts.user}".lower() or any(
                word in f"{key}={value or ''}".lower() for key, value in facts.tags.items()
            )

        return test


@dataclass(frozen=True)
class Has:
    """A query that matches runs with any value of a field."""

    field: RunField

    def __str__(self) -> str:
        return self.field.name

    def test(self, now: float) -> Predicate:
        get = self.field.get
        return lambda facts: get(facts) is not None


@dataclass(frozen=True)
class Compare:
    """A comparison of a field with a value, or several values for "in"."""

    field: RunField
    operator: Operator
    values: tuple[str, ...]

    def __str__(self) -> str:
        values = ", ".join(map(_literal, self.values))
        shown = f"({values})" if self.operator in ("in", "not in") else values
        return f"{self.field.name} {self.operator} {shown}"

    def test(self, now: float) -> Predicate:
        """Return a function that tells whether a run's facts pass the comparison.

        Raises:
            QueryError: A value does not fit the field. The position in the error is the index of this value.
        """
        match self.operator:
            case "!=" | "!~" | "not in" as negative:
                positive: dict[str, Operator] = {"!=": "=", "!~": "~", "not in": "in"}
                return _negated(Compare(self.field, positive[negative], self.values).test(now))
            case "in":
                tests = [_test(self.field, "=", value, now, at) for at, value in enumerate(self.values)]
                return lambda facts: any(test(facts) for test in tests)
        return _test(self.field, self.operator, self.values[0], now, 0)


@dataclass(frozen=True)
class Not:
    """A query that matches the runs which another query does not match."""

    node: Node

    def __str__(self) -> str:
        return f"not ({self.node})" if isinstance(self.node, (And, Or)) else f"not {self.node}"

    def test(self, now: float) -> Predicate:
        return _negated(self.node.test(now))


@dataclass(frozen=True)
class And:
    """Queries that must all match a run; without a query, every run matches."""

    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return " and ".join(f"({node})" if isinstance(node, (Or, And)) else str(node) for node in self.nodes)

    def test(self, now: float) -> Predicate:
        if not self.nodes:
            return lambda facts: True
        # Nest the tests instead of calling `all`, because creating a generator takes longer than a test.
        return reduce(_both, reversed([node.test(now) for node in self.nodes]))


@dataclass(frozen=True)
class Or:
    """Queries of which at least one must match a run."""

    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return " or ".join(f"({node})" if isinstance(node, Or) else str(node) for node in self.nodes)

    def test(self, now: float) -> Predicate:
        tests = [node.test(now) for node in self.nodes]
        return lambda facts: any(test(facts) for test in tests)


Node: TypeAlias = "Word | Has | Compare | Not | And | Or"


def parse(text: str, now: float | None = None) -> Node:
    """Return a query's syntax tree. `str(tree)` is an equivalent query.

    Args:
        text: The query; an empty one matches every run.
        now: Seconds since 1970, for relative times; default: the present.

    Raises:
        QueryError: The text is not a query; the error has the position and the expected text.

    Examples:
        >>> str(parse("resnet state=failed created>-7d"))
        'resnet and state = failed and created > -7d'
    """
    return _Parser(text, time.time() if now is None else now).query()


def predicate(text: str, now: float | None = None) -> Predicate:
    """Return a function that tells whether a run matches the query.

    Raises:
        QueryError: The text is not a query.

    Examples:
        >>> matches = predicate('metrics.acc > 0.9 and tags.team = "vision"')
        >>> [facts.name for facts in runs if matches(facts)]
        ['brave-otter-12']
    """
    now = time.time() if now is None else now
    return parse(text, now).test(now)


def tokens(text: str) -> list[QueryToken]:
    """Split a query into tokens. The last token has the kind "end".

    Raises:
        QueryError: The query is too long, a quote is not closed, or a character has no meaning.
    """
    if len(text) > LONGEST:
        raise QueryError(f"the query has {len(text)} characters, the limit is {LONGEST}", LONGEST, "a shorter query")
    found: list[QueryToken] = []
    at = 0
    while at < len(text):
        part = _TOKEN.match(text, at)
        if part is None:
            if text[at] in "\"'`":
                raise QueryError("a quote is not closed", at, f"{text[at]} at the end of the text")
            raise QueryError(f"{text[at]!r} has no meaning here", at, "an operator such as != or !~")
        match str(part.lastgroup), part[0]:
            case "string", value:
                found.append(QueryToken("string", unquoted(value[1:-1]), at, part.end()))
            case "operator", "==":
                found.append(QueryToken("operator", "=", at, part.end()))
            case "word", value if value.lower() in KEYWORDS:
                found.append(QueryToken("keyword", value.lower(), at, part.end()))
            case kind, value:
                found.append(QueryToken(kind, value, at, part.end()))
        at = part.end()
    found = [token for token in found if token.kind != "space"]
    return [*found, QueryToken("end", "", len(text), len(text))]


class _Parser:
    def __init__(self, text: str, now: float) -> None:
        self._tokens = tokens(text)
        self._at = 0
        self._depth = 0
        self._now = now

    @property
    def _next(self) -> QueryToken:
        return self._tokens[self._at]

    def _take(self) -> QueryToken:
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token

    def _takes(self, *texts: str) -> bool:
        is_next = self._next.kind in ("sign", "keyword") and self._next.text in texts
        self._at += is_next
        return is_next

    def query(self) -> Node:
        node = And(()) if self._next.kind == "end" else self._any()
        if self._next.kind != "end":
            raise QueryError(
                f"{self._next.text!r} does not fit here", self._next.at, "and, or, or the end of the query"
            )
        return node

    def _any(self) -> Node:
        nodes = [self._all()]
        while self._takes("or"):
            nodes.append(self._all())
        return Or(tuple(nodes)) if nodes[1:] else nodes[0]

    def _all(self) -> Node:
        nodes = [self._each()]
        while self._takes("and") or self._begins_operand():
            nodes.append(self._each())
        return And(tuple(nodes)) if nodes[1:] else nodes[0]

    def _begins_operand(self) -> bool:
        return self._next[:2] in (("keyword", "not"), ("sign", "(")) or self._next.kind in ("word", "string")

    def _each(self) -> Node:
        token = self._take()
        match token.kind, token.text:
            case "keyword", "not":
                with self._deeper(token):
                    return Not(self._each())
            case "sign", "(":
                with self._deeper(token):
                    node = self._any()
                    self._close("a parenthesis is not closed", ")")
                    return node
            case (("word" | "string"), _):
                return self._operand(token)
            case "end", _:
                raise QueryError("the query ends here", token.at, "a field, a word or a parenthesis")
        raise QueryError(f"{token.text!r} does not fit here", token.at, "a field, a word or a parenthesis")

    @contextlib.contextmanager
    def _deeper(self, token: QueryToken) -> Iterator[None]:
        self._depth += 1
        if self._depth > DEEPEST:
            raise QueryError(f"more than {DEEPEST} parentheses or nots are nested", token.at, "a flatter query")
        yield
        self._depth -= 1

    def _close(self, problem: str, expected: str) -> None:
        if not self._takes(")"):
            raise QueryError(problem, self._next.at, expected)

    def _operand(self, token: QueryToken) -> Node:
        follows, after = self._tokens[self._at], self._tokens[min(self._at + 1, len(self._tokens) - 1)]
        match follows[:2], after[:2]:
            case ("operator", operator), _:
                self._take()
                return self._comparison(token, cast("Operator", operator), [self._value(token, follows)])
            case ("keyword", "in"), _:
                self._at += 1
                return self._comparison(token, "in", self._list(token))
            case ("keyword", "not"), ("keyword", "in"):
                self._at += 2
                return self._comparison(token, "not in", self._list(token))
        group, dot, _ = token.text.partition(".")
        is_field = dot and token.kind == "word" and group.lower() in GROUPS
        return Has(field_of(token.text, token.at)) if is_field else Word(token.text)

    def _list(self, field: QueryToken) -> list[QueryToken]:
        if not self._takes("("):
            raise QueryError("in needs its values in parentheses", self._next.at, f"({field.text} in (a, b))")
        values = [self._value(field, self._next)]
        while self._takes(","):
            values.append(self._value(field, self._next))
        self._close("the list of values is not closed", ", or )")
        return values

    def _value(self, field: QueryToken, before: QueryToken) -> QueryToken:
        if self._next.kind not in ("word", "string"):
            raise QueryError(
                f"{before.text!r} lacks a value" if before.kind == "operator" else "a value is missing",
                self._next.at,
                f"a value to compare {field.text} with (quote a value with special characters)",
            )
        return self._take()

    def _comparison(self, name: QueryToken, operator: Operator, values: list[QueryToken]) -> Compare:
        if name.kind == "string":
            raise QueryError(f"{name.text!r} is a text and not a field", name.at, "a field such as state")
        node = Compare(field_of(name.text, name.at), operator, tuple(value.text for value in values))
        try:
            node.test(self._now)
        except QueryError as error:
            raise QueryError(error.problem, values[error.at].at, error.expected) from None
        return node


def _literal(value: str) -> str:
    return value if quoted(value) == value else json.dumps(value, ensure_ascii=False)


def _both(second: Predicate, first: Predicate) -> Predicate:
    return lambda facts: first(facts) and second(facts)


def _negated(test: Predicate) -> Predicate:
    return lambda facts: not test(facts)


# --- tests that compare a run's field with one value

_ORDER: dict[str, Callable[[float, float], bool]] = {"=": eq, "<": lt, "<=": le, ">": gt, ">=": ge}


def _test(field: RunField, operator: str, value: str, now: float, at: int) -> Predicate:
    get, text = field.get, value.lower()
    match field.kind, operator:
        case (("text" | "state" | "any"), "~"):
            return lambda facts: (found := get(facts)) is not None and text in str(found).lower()
        case _, "~":
            raise QueryError(f"~ searches in texts, and {field.name} is not a text", at, "one of =, !=, <, <=, >, >=")
        case "any", _:
            return _any_test(field, operator, value, at)
        case "number", _:
            return _number_test(get, operator, _number(field, value, at))
        case "duration", _:
            return _number_test(get, operator, _seconds(value, at))
        case "time", _:
            return _span_test(get, operator, *_times(field, value, now, at))
        case _, ("<" | "<=" | ">" | ">="):
            raise QueryError(f"{field.name} has no order for {operator}", at, "one of =, !=, ~, in")
        case "state", _:
            wanted = _states(value, at)
            return lambda facts: facts.state in wanted
        case "truth", _:
            is_wanted = {"true": True, "yes": True, "false": False, "no": False}.get(text)
            if is_wanted is None:
                raise QueryError(f"{field.name} is not {value[:80]!r}", at, "true or false")
            return lambda facts: get(facts) is is_wanted
    return lambda facts: get(facts) == value


def _number_test(get: Callable[[RunFacts], FieldValue], operator: str, number: float) -> Predicate:
    compare = _ORDER[operator]
    if math.isnan(number):
        # NaN does not equal itself, so `= nan` needs another test.
        return lambda facts: operator == "=" and isinstance(found := get(facts), float) and math.isnan(found)
    return lambda facts: (found := get(facts)) is not None and compare(cast("float", found), number)


def _any_test(field: RunField, operator: str, value: str, at: int) -> Predicate:
    """Return a predicate that compares a field with `value` as numbers; "=" also compares texts."""
    get, wanted = field.get, typed(value)
    if operator == "=":
        if isinstance(wanted, str):
            return lambda facts: get(facts) == wanted
        return lambda facts: (found := get(facts)) is not None and (found == value or _typed(found) == wanted)
    if isinstance(wanted, str):
        raise QueryError(
            f"{operator} compares numbers, and {value[:80]!r} is not a number", at, "a number such as 1e-3"
        )
    compare, number = _ORDER[operator], wanted
    return lambda facts: (
        (found := get(facts)) is not None and not isinstance(of := _typed(found), str) and compare(of, number)
    )


# Many runs have equal values.
_typed_text = lru_cache(maxsize=4096)(typed)


def _typed(value: FieldValue) -> float | str:
    return _typed_text(value) if isinstance(value, str) else cast("float", value)


def _span_test(get: Callable[[RunFacts], FieldValue], operator: str, least: float, most: float) -> Predicate:
    """Return a predicate that compares the time `get(facts)` with the span `least` to `most`."""
    tests: dict[str, Callable[[float], bool]] = {
        "=": lambda found: least <= found < most or found == least,
        "<": lambda found: found < least,
        "<=": lambda found: found < most or found == least,
        ">": lambda found: found >= most and found != least,
        ">=": lambda found: found >= least,
    }
    test = tests[operator]
    return lambda facts: (found := get(facts)) is not None and test(cast("float", found))


def _states(value: str, at: int) -> Collection[str]:
    known: dict[str, Collection[str]] = {state.lower(): {state} for state in (*states.ALL, HANGS)}
    known[states.RUNNING.lower()] = {states.RUNNING, HANGS}
    known[LIVE] = {*states.ALL, HANGS} - states.TERMINAL
    if found := known.get(value.lower().replace("_", "")):
        return found
    near = did_you_mean(value.capitalize(), (*states.ALL, HANGS, LIVE))
    raise QueryError(f"{value[:80]!r} is not a state.{near}", at, f"{LIVE}, {', '.join((*states.ALL, HANGS))}")


def _number(field: RunField, value: str, at: int) -> float:
    try:
        return float(value)
    except ValueError:
        raise QueryError(f"{field.name} is a number, and {value[:80]!r} is not", at, "a number such as 0.9") from None


def _seconds(value: str, at: int) -> float:
    try:
        return units.seconds(value)
    except ValueError:
        raise QueryError(f"{value[:80]!r} is not a duration", at, "a duration such as 90s, 5m or 1h30m") from None


def _times(field: RunField, value: str, now: float, at: int) -> tuple[float, float]:
    """Return a day's Unix times (start, end); for a moment, its time twice."""
    text = value.lower()
    try:
        today = dt.datetime.fromtimestamp(now).date()
        match text:
            case "today":
                return _day(today)
            case "yesterday":
                return _day(today - dt.timedelta(days=1))
            case "now":
                then = now
            case _ if text.startswith("-"):
                then = now - units.seconds(text[1:])
            case _ if len(text) == len("2026-11-30"):
                return _day(dt.date.fromisoformat(text))
            case _:
                then = dt.datetime.fromisoformat(value.upper().replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        expected = "a time ago (-7d, -12h), today, yesterday, a day (2026-11-30) or a time (2026-11-30T14:00)"
        raise QueryError(f"{field.name} is a time, and {value[:80]!r} is not", at, expected) from None
    return then, then


def _day(day: dt.date) -> tuple[float, float]:
    # Compute midnight from the calendar, since a day has 23 or 25 hours when the clocks change.
    begin, end = (dt.datetime.combine(one, dt.time()) for one in (day, day + dt.timedelta(days=1)))
    return begin.timestamp(), end.timestamp()
