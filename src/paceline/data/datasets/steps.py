"""The steps that select a data set's rows or files, recorded as plain data and done when they are read.

A step is a tuple that goes to JSON: ("take", 100), ("skip", 10), ("split", share, seed, 0 or 1), ("sample", share, seed),
("keep", columns), ("drop", columns) or ("filter", condition).

A condition is ("<", column, value), with any other comparison, ("null", column), ("and", one, other), ("or", one, other) or
("not", one); a moment among the values is ("time", ISO 8601).
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias

from paceline.data.sampling.order import GlobalOrder
from paceline.errors import DataError

Step: TypeAlias = "tuple[Any, ...]"
Steps: TypeAlias = "tuple[Step, ...]"

ROWS = ("take", "skip", "split", "sample")
COLUMNS = ("keep", "drop", "filter")


def count_step(verb: str, count: Any) -> Step:
    """("take", count) or ("skip", count).

    Raises:
        DataError: no integer of 0 or more.
    """
    # A bool is an int to Python. numpy's integers are none, but have `__index__`.
    if isinstance(count, bool) or not hasattr(count, "__index__") or count < 0:
        raise DataError(f"{verb}({count!r}): give a number of 0 or more.")
    return verb, int(count)


def split_steps(percentage: Any, seed: int | None) -> tuple[Step, Step]:
    """The two parts of a random split. seed: None draws one, which is then recorded.

    Raises:
        DataError: percentage is not between 0 and 1.
    """
    if isinstance(percentage, bool) or not isinstance(percentage, (int, float)) or not 0 <= percentage <= 1:
        raise DataError(f"random_split(percentage={percentage!r}): give the first part's share, between 0 and 1.")
    # Drawn now and kept in both steps: the two parts are read apart, at any time, and have to come of one split.
    if seed is None:
        seed = secrets.randbelow(1 << 32)
    return ("split", float(percentage), seed, 0), ("split", float(percentage), seed, 1)


def sample_step(probability: Any, seed: int | None) -> Step:
    """("sample", share, seed): each row or file by chance. seed: None draws one, which is then recorded.

    Raises:
        DataError: probability is not between 0 and 1.
    """
    if isinstance(probability, bool) or not isinstance(probability, (int, float)) or not 0 <= probability <= 1:
        raise DataError(f"take_sample(probability={probability!r}): give a number between 0 and 1.")
    return "sample", float(probability), secrets.randbelow(1 << 32) if seed is None else seed


def columns_step(verb: str, columns: str | Sequence[str]) -> Step:
    """("keep", names) or ("drop", names).

    Raises:
        DataError: not names.
    """
    names = [columns] if isinstance(columns, str) else list(columns)
    if not all(isinstance(name, str) for name in names) or (verb == "keep" and not names):
        raise DataError(f"{verb}_columns({columns!r}): give the names of columns, such as ['age', 'fare'].")
    return verb, tuple(names)


def chosen(step: Step, count: int) -> Sequence[int]:
    """The numbers, ascending, of those of `count` rows or files that a step takes.

    A split puts round(share x count) into its first part, whichever come first in `GlobalOrder(count, seed)`.
    """
    verb, *values = step
    if verb == "take":
        return range(min(values[0], count))
    if verb == "skip":
        return range(min(values[0], count), count)
    if verb == "sample":
        share, seed = values
        draw = random.Random(seed).random
        return [number for number in range(count) if draw() < share]
    share, seed, part = values
    order, cut = GlobalOrder(count, seed), round(share * count)
    # A split chooses rows or files, and leaves them in the order that they had.
    return sorted(order[cut:] if part else order[:cut])


def steps_from_json(data: Any) -> Steps:
    """The steps that JSON made lists of.

    Raises:
        DataError: a step that this version does not know.
    """
    # As tuples again, because steps are compared with those that a caller has made, and a list equals no tuple.
    steps = tuple(_tuples(step) for step in data or ())
    for step in steps:
        if not step or step[0] not in ROWS + COLUMNS:
            raise DataError(
                f"the step {step!r} of a dataset is none of {', '.join(ROWS + COLUMNS)}. A newer Paceline may have made it."
            )
    return steps


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
