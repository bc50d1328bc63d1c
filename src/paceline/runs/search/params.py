"""The parameters of a run: from the arguments of its script, its sweep, and its trackers.

Runs with the same names share one table of names, so that 100,000 runs fit into memory.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast

from paceline.system.units import is_number_text

#: Value of a parameter: a number if its text is a number, else the text.
ParamValue: TypeAlias = "float | str"

#: Maximum number of parameters of a run, and of characters in a parameter's name or value.
MOST_PARAMS, LONGEST = 1000, 300
_PAIR = re.compile(r"\+{0,2}([A-Za-z_][\w.@/:-]*)=(.*)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}", re.ASCII)


def arguments_by_name(words: Sequence[str]) -> dict[str, str]:
    """Return the values of a script's arguments by option.

    `--lr 0.1` and `--lr=0.1` give {"--lr": "0.1"}. A flag has the value "". The values of a repeated option are joined by
    spaces. The first positional argument has the name "argument 1".
    """
    values_by_name: dict[str, list[str]] = {}
    number, name = 0, None
    for word in words:
        if word.startswith("-") and word != "-" and not is_number_text(word):
            name, equals, value = word.partition("=")
            values_by_name.setdefault(name, [])
            if equals:
                values_by_name[name].append(value)
                name = None
        elif name is not None:
            values_by_name[name].append(word)
        else:
            number += 1
            values_by_name[f"argument {number}"] = [word]
    return {name: " ".join(values) for name, values in values_by_name.items()}


def params_of(
    arguments: Sequence[str], swept: Mapping[str, object], tracked: Mapping[str, object]
) -> dict[str, ParamValue]:
    """Return a run's parameters by name, without leading dashes.

    A parameter in a later argument of this function replaces the same parameter in an earlier argument.

    Args:
        arguments: Arguments of the script. A flag has the value "true", and `lr=0.1` is a parameter too.
        swept: Values that a sweep chose for the run.
        tracked: Properties of the run, in which trackers store the parameters that a script logs.

    Examples:
        >>> params_of(["--lr", "1e-3", "--amp", "model.depth=18"], {}, {"batch": "64"})
        {'lr': 0.001, 'amp': 'true', 'model.depth': 18, 'batch': 64}
    """
    found: dict[str, object] = {}
    for name, value in arguments_by_name(arguments).items():
        pairs = {pair[1]: pair[2] for pair in map(_PAIR.fullmatch, value.split()) if pair}
        found |= pairs
        if name.startswith("-"):
            found[name.lstrip("-") or name] = value or "true"
        elif not pairs:
            found[name] = value
    # Remove leading dashes, because a sweep may name a parameter like the script's option, such as --lr.
    found = {**found, **{name.lstrip("-") or name: value for name, value in swept.items()}, **tracked}
    return {name[:LONGEST]: typed(value) for name, value in [*found.items()][:MOST_PARAMS]}


def typed(value: object) -> ParamValue:
    """Return a number or its text as a number, and any other value as text."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return value
        case str():
            text = value[:LONGEST]
        case _:
            text = json.dumps(value, default=str)[:LONGEST]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if "_" not in text and is_number_text(text) else text


# --- mappings that need little memory

_V = TypeVar("_V")
#: Maximum number of names in all shared tables together. So many names need about 100 MB.
_MOST_NAMES = 1_000_000


class Names:
    """A table of keys that `PackedMapping` objects share, to save memory.

    `at` has the position of each key's value.
    """

    __slots__ = ("at",)

    def __init__(self, names: tuple[str, ...]) -> None:
        self.at = {sys.intern(name): place for place, name in enumerate(names)}


_tables: dict[tuple[str, ...], Names] = {}
_held = 0


def names_of(names: tuple[str, ...]) -> Names:
    """Return the shared table (`Names`) of these names."""
    global _held
    found = _tables.get(names)
    if found is None:
        # Drop all tables when they are large: each time a running run logs a new name, its old table becomes unused.
        _held += len(names)
        if _held > _MOST_NAMES:
            _tables.clear()
            _held = len(names)
        found = _tables[names] = Names(names)
    return found


#: (type, value) -> the object with this value that all runs share, such as a learning rate or the name of a team.
_shared: dict[tuple[type, object], Any] = {}
_MOST_VALUES = 10_000


class PackedMapping(Mapping[str, _V]):
    """A mapping that stores only values, and shares a table of names."""

    __slots__ = ("_names", "_values")

    def __init__(self, values: Mapping[str, _V]) -> None:
        self._names = names_of(tuple(values))
        self._values = tuple(_shared.setdefault((value.__class__, value), value) for value in values.values())
        if len(_shared) > _MOST_VALUES:
            _shared.clear()

    def __getitem__(self, name: str) -> _V:
        return cast("_V", self._values[self._names.at[name]])

    def get(self, name: str, default: object = None) -> Any:
        # The inherited method takes four times as long, because it catches a KeyError.
        place = self._names.at.get(name)
        return default if place is None else self._values[place]

    def __contains__(self, name: object) -> bool:
        return name in self._names.at

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.at)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


def packed(values: Mapping[str, _V]) -> PackedMapping[_V]:
    """Return a copy of a mapping that takes less memory."""
    return cast("PackedMapping[_V]", _packed(tuple(values), *values.values()))


# Cache mappings, so that runs with equal mappings share one object. Without `typed`, 1 and 1.0 would be equal.
@lru_cache(maxsize=2000, typed=True)
def _packed(names: tuple[str, ...], *values: object) -> PackedMapping[object]:
    return PackedMapping(dict(zip(names, values, strict=True)))
