"""NumPy arrays between the ranks, as the engine takes them: what every framework's collectives come down to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def plain(array: Array) -> Array:
    """The array as the engine knows it: of a type that NumPy lacks (bfloat16, float8), its bits."""
    # NumPy's own types have a 1 there. Those that ml_dtypes adds have a 2, and mean nothing to the engine.
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def as_type(array: Array, like: Array) -> Array:
    """An array that `plain` has made, in the type of `like` again."""
    return array if array.dtype == like.dtype else array.view(like.dtype)


def broadcast_async_(
    array: Array, root_rank: int, name: str | None, process_set: ProcessSet = global_process_set
) -> int:
    """The handle of a broadcast into the array itself."""
    return handles.submit("broadcast", name, process_set, lambda _: array, array, {"root": root_rank, "out": array})


def allgather_async(array: Array, name: str | None, process_set: ProcessSet = global_process_set) -> int:
    """The handle of the ranks' arrays, one below the other; their first dimensions may differ."""
    return handles.submit("allgather", name, process_set, lambda result: result, array, {})


def allreduce_async(array: Array, op: str, name: str | None, process_set: ProcessSet = global_process_set) -> int:
    """The handle of the ranks' arrays reduced, as a new array. op: the engine's name of the operation."""
    return handles.submit("allreduce", name, process_set, lambda result: result, array, {"op": op})
