"""Steps that select rows or files when a dataset is read.

A step is a tuple that is stored as JSON: ("take", 100), ("skip", 10), ("split", share, seed, part 0 or 1), ("sample",
share, seed), ("keep", columns), ("drop", columns) or ("filter", condition).

A condition is ("<", column, value) or another comparison, ("null", column), ("and", left, right), ("or", left, right) or
("not", operand). A datetime value is ("time", ISO 8601).
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypedDict

from paceline.data.sampling.order import GlobalOrder
from paceline.errors import DataError

Step: TypeAlias = "tuple[Any, ...]"
Steps: TypeAlias = "tuple[Step, ...]"


class Reading(TypedDict, total=False):
    """Options for reading a dataset's files, such as the separator of CSV files."""

    format: str
    separator: str
    header: bool
    infer_column_types: bool
    empty_as_string: bool
    encoding: str
    types: dict[str, str]
    include_path: bool
    partition_format: str
    # Only tables made through the Azure SDK's names have these keys.
    partition_keys: list[str]
    timestamp: str | None


ROWS = ("take", "skip", "split", "sample")
COLUMNS = ("keep", "drop", "filter")


def count_step(verb: str, count: Any) -> Step:
    """Return the dataset step that takes or skips (`verb`) `count` rows or files.

    Raises:
        DataError: The count is not an integer of 0 or more.
    """
    # Refuse a bool, although it is an int in Python. Accept a NumPy integer, which is not an int, but has `__index__`.
    if isinstance(count, bool) or not hasattr(count, "__index__") or count < 0:
        raise DataError(f"{verb}({count!r}): give a number of 0 or more.")
    return verb, int(count)


def split_steps(percentage: object, seed: int | None) -> tuple[Step, Step]:
    """Return the dataset steps that select the two parts of a random split.

    Raises:
        DataError: percentage is not between 0 and 1.
    """
    share = _share(
        percentage, f"random_split(percentage={percentage!r}): give the first part's share, between 0 and 1."
    )
    # Draw the seed now, because the two parts of the split are read separately and must use one seed.
    seed = _drawn(seed)
    return ("split", share, seed, 0), ("split", share, seed, 1)


def sample_step(probability: object, seed: int | None) -> Step:
    """Return the dataset step that keeps each row or file with a probability.

    Raises:
        DataError: probability is not between 0 and 1.
    """
    share = _share(probability, f"take_sample(probability={probability!r}): give a number between 0 and 1.")
    return "sample", share, _drawn(seed)


def _share(value: object, refusal: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise DataError(refusal)
    return float(value)


def _drawn(seed: int | None) -> int:
    return secrets.randbelow(1 << 32) if seed is None else seed


def columns_step(verb: str, columns: str | Sequence[str]) -> Step:
    """Return the dataset step that keeps or drops (`verb`) these columns.

    Raises:
        DataError: The columns are not names.
    """
    names = [columns] if isinstance(columns, str) else list(columns)
    if not all(isinstance(name, str) for name in names) or (verb == "keep" and not names):
        raise DataError(f"{verb}_columns({columns!r}): give the names of columns, such as ['age', 'fare'].")
    return verb, tuple(names)


def chosen(step: Step, count: int) -> Sequence[int]:
    """Return the ascending indices that a dataset step selects from `count` rows or files.

    The first part of a split has the first round(share x count) indices of `GlobalOrder(count, seed)`.
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
    # Sort the positions, because both parts of a split keep the original order of the rows.
    return sorted(order[cut:] if part else order[:cut])


def steps_from_json(data: Iterable[object] | None) -> Steps:
    """Convert a dataset's steps from JSON back to tuples.

    Raises:
        DataError: A step is unknown to this version.
    """
    # Convert lists of the JSON to tuples: steps are compared with a caller's tuples, and a list never equals a tuple.
    steps = tuple(_tuples(step) for step in data or ())
    for step in steps:
        if not step or step[0] not in ROWS + COLUMNS:
            raise DataError(
                f"the step {step!r} of a dataset is not one of {', '.join(ROWS + COLUMNS)}. A newer Paceline may have made it."
            )
    return steps


def _tuples(value: object) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
