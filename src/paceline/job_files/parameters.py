"""Parameters of job files: `lr: ${lr:0.1}` in the file, `lr=0.2` on the command line.

${lr:0.1}    the value of lr, by default 0.1
${lr}        the value of lr, which has to be given, on the command line or as a default elsewhere in the file
$${lr}       the text ${lr}
${RANK}      stays: a name in upper case is a variable of the worker
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import JobError
from paceline.system.names import did_you_mean

_PLACE = re.compile(r"(\$?)\$\{([a-z][A-Za-z0-9_]*)(?::([^{}]*))?\}")


@dataclass(frozen=True)
class FileParameter:
    """A parameter of a job file.

    Attributes:
        default: None if the parameter has no default.
        line: Number of the line with the default, or else of the first line with the parameter.
    """

    name: str
    default: str | None
    line: int


def found_in(path: Path, node: Any) -> dict[str, FileParameter]:
    """Return a job file's parameters by name.

    Raises:
        JobError: A parameter has two defaults.
    """
    found: dict[str, FileParameter] = {}
    for scalar in _scalars(node):
        for place in _PLACE.finditer(scalar.value):
            if place[1]:
                continue
            name, line = place[2], int(scalar.start_mark.line) + 1
            here = FileParameter(name, place[3].strip() if place[3] is not None else None, line)
            before = found.setdefault(name, here)
            if before.default is None:
                found[name] = here if here.default is not None else before
            elif here.default not in (None, before.default):
                raise JobError(
                    f"{str(path)!r}, line {here.line}: parameter {name} has the default {here.default!r} here and "
                    f"{before.default!r} in line {before.line}. Write the default once, and ${{{name}}} elsewhere."
                )
    return found


def fill(
    path: Path, node: Any, given: Mapping[str, str], offered: Mapping[str, str] | None, replaced: Collection[str]
) -> None:
    """Replace parameters in a YAML file by the values `given`, or defaults.

    `offered` are further values, for parameters that the file may lack. `node` is the file's YAML tree, changed in place.
    The keys `replaced` are removed, because arguments of the command line replace their values.

    Raises:
        JobError: A given name is not a parameter of the file, or only of `replaced` keys, or a parameter has no value.
    """
    known = found_in(path, node)
    if unknown := [name for name in given if name not in known]:
        has = f"It has {', '.join(known)}" if known else f"It has none: a file has ${{{unknown[0]}:DEFAULT}} in a value"
        hint = did_you_mean(unknown[0], known)
        raise JobError(
            f"{str(path)!r} has no parameter {unknown[0]!r}.{hint} {has}. Put arguments of the script behind `--`."
        )
    node.value = [(key, value) for key, value in node.value if key.value not in replaced]
    used = found_in(path, node)
    if lost := [f"{name}={value}" for name, value in given.items() if name not in used]:
        raise JobError(
            f"{lost[0]} has no effect: the arguments behind `--` replace {' and '.join(replaced)} of {str(path)!r}. "
            f"Leave {lost[0]} out, or put all arguments behind `--`."
        )
    values = {name: one.default for name, one in known.items()} | {**(offered or {})} | {**given}
    if lacking := [one for one in used.values() if values[one.name] is None]:
        names, first = ", ".join(one.name for one in lacking), lacking[0].name
        raise JobError(
            f"{str(path)!r}, line {lacking[0].line}: no value for {names}. Write {first}=VALUE behind the file's name, or a "
            f"default into the file: ${{{first}:DEFAULT}}. $${{{first}}} stands for the text ${{{first}}}."
        )
    _replace(node, values)


def escaped(value: Any) -> Any:
    """Escape each `${NAME}` in a value, so that it is no parameter."""
    if isinstance(value, str):
        return _PLACE.sub(lambda place: f"${place[0]}", value)
    if isinstance(value, list):
        return [escaped(one) for one in value]
    return {key: escaped(one) for key, one in value.items()} if isinstance(value, dict) else value


def _replace(node: Any, values: Mapping[str, str | None]) -> None:
    import yaml

    loader = yaml.SafeLoader("")
    for scalar in _scalars(node):
        text = _PLACE.sub(lambda place: place[0][1:] if place[1] else str(values[place[2]]), scalar.value)
        if text != scalar.value:
            scalar.value = text
            # An unquoted value gets the type that YAML gives to its new text: a number, true, or empty.
            if scalar.style is None:
                scalar.tag = loader.resolve(yaml.ScalarNode, text, (True, False))


def _scalars(node: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield each value in a YAML file once, without the keys of mappings."""
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node.value, str):
        yield node
    for one in node.value if isinstance(node.value, list) else ():
        yield from _scalars(one[1] if isinstance(one, tuple) else one, seen)
