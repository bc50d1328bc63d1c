"""The numbers of the reduce operations, and the choice between `average=` and `op=`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

# Use the same numbers as Horovod, because scripts and saved settings contain them.
Average, Sum, Adasum, Min, Max, Product = range(6)

#: Number of the operation -> its name in the engine.
ENGINE_NAMES = {Average: "average", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}


def resolve_op(op: int | None, average: bool | None) -> int:
    """Return the requested reduce operation, Average by default."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op not in ENGINE_NAMES:
            names = ", ".join(f"hvd.{name.capitalize()}" for name in ENGINE_NAMES.values())
            raise ValueError(f"op={op!r} is not an operation of Horovod's. Give one of {names}.")
        return op
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op`: say op=hvd.Average or op=hvd.Sum.",
            DeprecationWarning,
            # Let the warning name the line of the script, two calls above this function.
            stacklevel=3,
        )
        return Average if average else Sum
    return Average


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Call `resolve_op`, under the name that scripts import from `horovod.common.util`."""
    return resolve_op(op, average)


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def equal_splits(rows: int, size: int) -> list[int]:
    """Return each rank's number of rows. Raise unless `size` ranks get equal shares."""
    if rows % size:
        raise ValueError(
            f"alltoall without splits needs a first dimension that {size} ranks can share equally; it is {rows}. Give splits."
        )
    return [rows // size] * size


def check_splits(splits: Sequence[int], rows: int, size: int) -> None:
    """Raise an error if alltoall's splits do not fit the rows or ranks."""
    if len(splits) != size:
        raise ValueError(f"splits has {len(splits)} entries, but there are {size} ranks: give one for each.")
    if any(count < 0 for count in splits):
        raise ValueError(f"splits={list(splits)} has a negative entry.")
    if sum(splits) > rows:
        raise ValueError(
            "Sum of splits entries is greater than the first dimension of tensor: "
            f"{sum(splits)} rows are to be sent, but there are {rows}."
        )
