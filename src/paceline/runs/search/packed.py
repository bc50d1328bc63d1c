"""Small mappings: runs with the same names share one table of names, so that 100,000 runs fit into memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

_V = TypeVar("_V")
#: Most tables of names that runs share.
_MOST_TABLES = 10_000


class Names:
    """The position of each name in a packed mapping. `at` keeps the order of the names."""

    __slots__ = ("at",)

    def __init__(self, names: tuple[str, ...]) -> None:
        self.at = {sys.intern(name): place for place, name in enumerate(names)}


_tables: dict[tuple[str, ...], Names] = {}


def names_of(names: tuple[str, ...]) -> Names:
    """Return the shared table of these names."""
    found = _tables.get(names)
    if found is None:
        if len(_tables) >= _MOST_TABLES:
            _tables.clear()
        found = _tables[names] = Names(names)
    return found


class PackedMapping(Mapping[str, _V]):
    """A mapping that holds only its values; the names are shared."""

    __slots__ = ("_names", "_values")

    def __init__(self, values: Mapping[str, _V]) -> None:
        self._names = names_of(tuple(values))
        self._values = tuple(values.values())

    def __getitem__(self, name: str) -> _V:
        return self._values[self._names.at[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names.at

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.at)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


_EMPTY: PackedMapping[object] = PackedMapping({})


def packed(values: Mapping[str, _V]) -> PackedMapping[_V]:
    """Return a packed copy of a mapping; all empty ones are one object."""
    return PackedMapping(values) if values else cast("PackedMapping[_V]", _EMPTY)
