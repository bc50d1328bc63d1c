"""All-gather, broadcast and all-to-all of arrays whose ranks have agreed. Rows are moved as they are, whatever they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.collectives.transport import Transport


def allgather(transport: Transport | None, array: Any, rows: Sequence[int]) -> Any:
    """The arrays of all ranks, one below the other. rows: first dimension on each rank."""
    import numpy

    result = numpy.empty((sum(rows), *array.shape[1:]), array.dtype)
    if transport is None:
        result[...] = array
    elif result.nbytes:
        transport.allgather(array, result, rows)
    return result


def broadcast(transport: Transport | None, array: Any, out: Any, root: int) -> Any:
    """`out`, filled with the root's array."""
    import numpy

    is_root = transport is None or transport.rank == root
    if is_root and out.__array_interface__["data"] != array.__array_interface__["data"]:
        numpy.copyto(out, array)
    if transport is not None and out.nbytes:
        transport.broadcast(out.reshape(-1).view(numpy.uint8), root)
    return out


def alltoall(transport: Transport | None, array: Any, splits: Sequence[Sequence[int]]) -> tuple[Any, tuple[int, ...]]:
    """The rows that all ranks send to this one, one below the other, and how many came from each.

    splits: of each rank, the rows that it sends to each.
    """
    import numpy

    rank = 0 if transport is None else transport.rank
    received = tuple(row[rank] for row in splits)
    result = numpy.empty((sum(received), *array.shape[1:]), array.dtype)
    if transport is None:
        result[...] = array[: result.shape[0]]
    elif any(any(row) for row in splits) and 0 not in array.shape[1:]:
        transport.alltoall(array, splits[rank], result, received)
    return result, received
