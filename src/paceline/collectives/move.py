"""All-gather, broadcast and all-to-all of arrays whose ranks have agreed. Rows are moved as they are, whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

#: MPI counts in 32-bit numbers.
_BROADCAST_BYTES = 1 << 30


def allgather(comm: Any, array: Any, rows: Sequence[int]) -> Any:
    """The arrays of all ranks, one below the other. rows: first dimension on each rank."""
    import numpy

    result = numpy.empty((sum(rows), *array.shape[1:]), array.dtype)
    if comm is None:
        result[...] = array
    elif result.nbytes:
        with _row_type(result) as row:
            comm.Allgatherv([array, rows[comm.rank], row], [result, rows, _starts(rows), row])
    return result


def broadcast(comm: Any, array: Any, out: Any, root: int) -> Any:
    """`out`, filled with the root's array."""
    import numpy

    if (comm is None or comm.rank == root) and out.__array_interface__["data"] != array.__array_interface__["data"]:
        numpy.copyto(out, array)
    if comm is not None and out.nbytes:
        whole = out.reshape(-1).view(numpy.uint8)
        for start in range(0, whole.size, _BROADCAST_BYTES):
            comm.Bcast(whole[start : start + _BROADCAST_BYTES], root)
    return out


def alltoall(comm: Any, array: Any, splits: Sequence[Sequence[int]]) -> tuple[Any, tuple[int, ...]]:
    """What all ranks send to this one, one below the other, and how many rows came from each.

    splits: of each rank, the rows that it sends to each.
    """
    import numpy

    rank = 0 if comm is None else comm.rank
    received = tuple(row[rank] for row in splits)
    result = numpy.empty((sum(received), *array.shape[1:]), array.dtype)
    if comm is None:
        result[...] = array[: result.shape[0]]
    elif any(any(row) for row in splits):
        sent = splits[rank]
        with _row_type(array) as row:
            if row is not None:
                comm.Alltoallv([array, sent, _starts(sent), row], [result, received, _starts(received), row])
    return result, received


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


@contextmanager
def _row_type(array: Any) -> Iterator[Any]:
    """An MPI datatype that holds one row: counts in rows pass 2 GiB where counts in bytes don't. None: rows are empty."""
    from mpi4py import MPI

    row_bytes = array.itemsize
    for length in array.shape[1:]:
        row_bytes *= length
    if not row_bytes:
        yield None
        return
    row = MPI.BYTE.Create_contiguous(row_bytes).Commit()
    try:
        yield row
    finally:
        row.Free()
