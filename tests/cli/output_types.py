"""The types of the command line's JSON, as the documentation lists them, and a check of values against them."""

from __future__ import annotations

import functools
import operator
import pydoc
import re
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Union

from paceline.cli import outputs

_PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
#: Strings for the numbers that JSON does not have.
_NUMBERS = ("NaN", "Infinity", "-Infinity")


@cache
def documented() -> dict[tuple[str, ...], Any]:
    """Words of a command -> its type."""
    found: dict[tuple[str, ...], Any] = {}
    section = _PAGE.read_text().partition("### Types")[2].partition("###")[0]
    for commands, kinds in re.findall(r"^\| (`.*) \| (`[^`]+`.*) \|$", section, re.MULTILINE):
        kind = functools.reduce(operator.or_, map(_type, re.findall("`([^`]+)`", kinds)))
        for command in re.findall("`([^`]+)`", commands):
            found[tuple(command.split())] = kind
    assert len(found) > 60
    return found


def _type(text: str) -> Any:
    return pydoc.locate(text) if text.startswith("paceline.") else eval(text, {**vars(outputs)})


def type_of(words: Sequence[str]) -> Any:
    """Return the documented type of a command's output, or None."""
    rows = [row for row in documented() if _fits(row, words)]
    return documented()[max(rows, key=len)] if rows else None


def _fits(row: Sequence[str], words: Sequence[str]) -> bool:
    verbs = [word for word in row if not word.startswith("-")]
    return list(words[: len(verbs)]) == verbs and {*row} - {*verbs} <= {*words}


def misfits(value: object, kind: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each place of a JSON value that is not of its type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in (object, Any):
        return
    if origin in (Union, types.UnionType):
        if all(any(True for _ in misfits(value, part)) for part in parts):
            yield f"{place}: {value!r} is no {kind}"
    elif origin is typing.Literal:
        if value not in parts:
            yield f"{place}: {value!r} is none of {parts}"
    elif typing.is_typeddict(kind):
        if not isinstance(value, dict):
            yield f"{place}: {value!r} is no object"
            return
        hints = typing.get_type_hints(kind)
        yield from (f"{place}.{name}: is not in {kind.__name__}" for name in value.keys() - hints.keys())
        yield from (f"{place}.{name}: is missing" for name in kind.__required_keys__ - value.keys())
        for name in value.keys() & hints.keys():
            yield from misfits(value[name], hints[name], f"{place}.{name}")
    elif origin in (list, dict, tuple):
        if not isinstance(value, dict if origin is dict else list):
            yield f"{place}: {value!r} is no {kind}"
            return
        items: Iterator[tuple[object, object]] = (
            iter(value.items()) if isinstance(value, dict) else enumerate(typing.cast("list[object]", value))
        )
        for number, (key, item) in enumerate(items):
            part = parts[-1] if origin is not tuple else parts[number]
            yield from misfits(item, part, f"{place}[{key!r}]")
    elif kind is float:
        if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in _NUMBERS):
            yield f"{place}: {value!r} is no number"
    elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{place}: {value!r} is no {kind.__name__}"
