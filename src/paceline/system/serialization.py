"""Convert frozen dataclasses to JSON values and back, and nested mappings to flat ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict


def plain_fields(record: Any) -> dict[str, object]:
    """Return {field: JSON value} of a dataclass instance."""
    return {field.name: plain_value(getattr(record, field.name)) for field in fields(record)}


def flat(
    values: Mapping[Any, object], above: str = "", *, is_whole: Callable[[Mapping[Any, object]], bool] = lambda _: False
) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of nested mappings, such as ("optimizer.lr", 0.1).

    is_whole: Returns whether to yield a mapping as one value. above: Prefix of every name, such as "optimizer.".
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and not is_whole(value):
            yield from flat(value, f"{above}{key}.", is_whole=is_whole)
        else:
            yield f"{above}{key}", value


def known_fields(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of `data` for which the dataclass `kind` has a field."""
    names = _names(kind)
    return {name: value for name, value in data.items() if name in names}


@cache
def _names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


def plain_value(value: Any) -> Any:
    """Return a value as JSON data: by `to_json()` if possible, a path as text."""
    # Test for the most common types first, to save time: the record of a pipeline has up to a thousand steps.
    if value is None or isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


type_hints = cache(get_type_hints)


def fits(value: object, hint: Any) -> bool:
    """Return whether a JSON value has the type `hint`; a list or object also that of a tuple or dataclass."""
    if type(value) is hint or hint is Any:  # nearly all values, so test for this first
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin in (tuple, list):
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value)
    if origin in (Mapping, dict):
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if is_typeddict(hint):
        hints = type_hints(hint)
        if not isinstance(value, dict) or not hint.__required_keys__ <= value.keys():
            return False
        return all(fits(v, hints[k]) for k, v in value.items() if k in hints)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = type_hints(hint) | getattr(hint, "JSON_HINTS", {})
        return isinstance(value, dict) and all(fits(v, hints[k]) for k, v in value.items() if k in hints)
    kinds = (int, float) if hint is float else hint
    return isinstance(value, kinds) and not (isinstance(value, bool) and hint in (int, float))
