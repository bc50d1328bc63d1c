"""Names of equal layers in one: a model of many blocks is told in a few lines. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable


def fold(names: Iterable[str]) -> list[str]:
    """The names, those that differ in their first number alone as one: blocks.{0..3}.up; in the order of the first."""
    numbers: dict[str | tuple[str, str], list[int]] = {}
    for name in names:
        found = re.search(r"(?<![^.])\d+(?![^.])", name)
        if found is None:
            numbers[name] = []
        else:
            numbers.setdefault((name[: found.start()], name[found.end() :]), []).append(int(found.group()))
    return [key if isinstance(key, str) else f"{key[0]}{_span(found)}{key[1]}" for key, found in numbers.items()]


def _span(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"
