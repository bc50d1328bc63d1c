"""The parameters of a run: from the arguments of its script, its sweep, and its trackers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from paceline.system.units import is_number_text

#: A parameter's value: a number where its text is a number, else the text.
ParamValue: TypeAlias = "float | str"

#: Most parameters of a run, and the most characters of a name or value.
MOST_PARAMS, LONGEST = 1000, 300
_PAIR = re.compile(r"\+{0,2}([A-Za-z_][\w.@/:-]*)=(.*)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}", re.ASCII)


def arguments_by_name(words: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a script by option.

    `--lr 0.1` and `--lr=0.1` are {"--lr": "0.1"}, a flag has "", a repeated option has all values, and a positional argument
    has its number from 1.
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
    """Return the parameters of a run by name, without leading dashes.

    Later sources replace earlier ones.

    Args:
        arguments: Of the script. A flag has the value "true", and `lr=0.1` is a parameter too.
        swept: Values that a sweep chose for the run.
        tracked: Properties of the run: trackers store the parameters there that a script logs.

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
    found = {**found, **swept, **tracked}
    return {name[:LONGEST]: typed(value) for name, value in [*found.items()][:MOST_PARAMS]}


def typed(value: object) -> ParamValue:
    """Return numbers, and texts that are numbers, as numbers, and other values as texts."""
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
