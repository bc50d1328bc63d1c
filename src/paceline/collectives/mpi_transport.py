"""The engine's transport over MPI."""

from __future__ import annotations

import array as arrays
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from paceline.collectives import mpi
from paceline.collectives.errors import ShutDownError
from paceline.collectives.request import pack_message, unpack_message
from paceline.collectives.transport import SharedSegments, share_segments

if TYPE_CHECKING:
    from mpi4py import MPI

    from paceline.collectives.numbers import Array

#: Broadcast at most this many bytes with one call, because MPI's counts are 32-bit numbers.
_BROADCAST_BYTES = 1 << 30
_EXCHANGE_TAG = 3
_FIRST_TAG = 10
_TAGS = 30000
_LEAVE_S = 1.0
#: While it waits at a barrier, a process polls this many times before it yields its core.
_LOOKS = 20


class MpiTransport:
    """The transport over an MPI communicator.

    `generation` is the number of earlier engines in this process. It selects the tag of messages, so that an engine
    never receives an earlier engine's messages. With `owned`, `close` frees the communicator.
    """

    def __init__(self, comm: MPI.Comm, generation: int = 0, owned: bool = False) -> None:
        from mpi4py import MPI

        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._mpi = MPI
        self._generation = generation
        self._tag = _FIRST_TAG + generation % _TAGS
        self._owned = owned
        self._sends: list[tuple[MPI.Request, bytes]] = []
        sums = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}
        # As in NumPy, a sum of bools is "any", and a product is "all".
        truths = {"sum": MPI.MAX, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.MIN}
        self._operations = {False: sums, True: truths}

    def send(self, data: bytes, rank: int) -> None:
        # MPI reads the bytes until the send request is done, so keep each request together with its bytes.
        if self._sends:
            self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        self._sends.append((self.comm.Isend([data, len(data), self._mpi.BYTE], rank, self._tag), data))

    def receive(self) -> tuple[int, bytearray] | None:
        status = self._mpi.Status()
        # A matched probe removes the message from MPI's queue and returns its length, so that this rank can create the buffer.
        message = self.comm.Improbe(self._mpi.ANY_SOURCE, self._tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([data, len(data), self._mpi.BYTE])
        return status.Get_source(), data

    def allreduce(self, source: Array, target: Array, op: str) -> None:
        if _saturates(target, op):
            wide = source.astype("int32")
            self.allreduce(wide, wide, op)
            target[...] = wide
            return
        operation = self._operations[target.dtype.kind == "b"][op]
        self.comm.Allreduce(self._mpi.IN_PLACE if source is target else _viewed(source), _viewed(target), operation)

    def reducescatter(self, source: Array, target: Array, counts: Sequence[int], op: str) -> None:
        if _saturates(target, op):
            wide = target.astype("int32")
            self.reducescatter(source.astype("int32"), wide, counts, op)
            target[...] = wide
            return
        operation = self._operations[target.dtype.kind == "b"][op]
        self.comm.Reduce_scatter(_viewed(source), _viewed(target), list(counts), operation)

    def allgather(self, array: Array, result: Array, rows: Sequence[int]) -> None:
        with self._row_type(result) as row:
            self.comm.Allgatherv([array, rows[self.rank], row], [result, rows, _starts(rows), row])

    def broadcast(self, array: Array, root: int) -> None:
        for start in range(0, array.size, _BROADCAST_BYTES):
            self.comm.Bcast(array[start : start + _BROADCAST_BYTES], root)

    def alltoall(self, array: Array, sent: Sequence[int], result: Array, received: Sequence[int]) -> None:
        with self._row_type(array) as row:
            self.comm.Alltoallv([array, sent, _starts(sent), row], [result, received, _starts(received), row])

    def exchange(self, array: Array, other: Array, partner: int) -> None:
        self.comm.Sendrecv(array, partner, _EXCHANGE_TAG, other, partner, _EXCHANGE_TAG)

    def share_segments(self, size: int) -> SharedSegments | None:
        return share_segments(self.rank, self.size, self.gather_objects, self._meet, size)

    def gather_objects(self, value: object) -> list[Any]:
        # mpi4py's own methods for objects unpickle any class. `unpack_message` accepts only the classes of messages.
        data = pack_message(value)
        sizes = arrays.array("q", [0] * self.size)
        self.comm.Allgather([arrays.array("q", [len(data)]), 1, self._mpi.INT64_T], [sizes, 1, self._mpi.INT64_T])
        everything, starts = bytearray(sum(sizes)), _starts(sizes)
        byte = self._mpi.BYTE
        self.comm.Allgatherv([data, len(data), byte], [everything, list(sizes), starts, byte])
        return [unpack_message(everything[at : at + size]) for at, size in zip(starts, sizes, strict=True)]

    def split(self, members: Sequence[int], number: int) -> MpiTransport | None:
        comm = self.comm.Split(0 if self.rank in members else self._mpi.UNDEFINED, self.rank)
        # MPI reuses the number of a freed communicator, and would deliver old messages to the new communicator. So use a new tag.
        return MpiTransport(comm, self._generation * 101 + number, owned=True) if self.rank in members else None

    def watched(self) -> dict[int, int]:
        return {}

    def close(self) -> None:
        end_s = time.monotonic() + _LEAVE_S
        while self._sends and time.monotonic() < end_s:
            self._sends = [(request, data) for request, data in self._sends if not request.Test()]
        if self._owned and not self._sends and not mpi.is_abandoned():
            self.comm.Free()

    def abandon(self, reason: str) -> None:
        # MPI can't interrupt a thread that is inside a call. Only skip MPI's finalization at exit, which would wait for the dead
        # rank.
        mpi.abandon()

    def _meet(self) -> None:
        request, looks = self.comm.Ibarrier(), 0
        while not request.Test():
            looks += 1
            if looks > _LOOKS:
                if mpi.is_abandoned():
                    raise ShutDownError("a rank has not come to a reduction")
                os.sched_yield()

    @contextmanager
    def _row_type(self, array: Array) -> Iterator[MPI.Datatype]:
        # Count rows instead of bytes, because MPI's counts are 32-bit numbers, and arrays may be larger than 2 GiB.
        row = self._mpi.BYTE.Create_contiguous(array.itemsize * math.prod(array.shape[1:])).Commit()
        try:
            yield row
        finally:
            row.Free()


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _saturates(array: Array, op: str) -> bool:
    """Return whether Open MPI may saturate this sum, where NumPy wraps around."""
    # With AVX (component op/avx), Open MPI saturates 8- and 16-bit integers where NumPy wraps around. Sums of 32 bits or more
    # wrap around in both.
    return op == "sum" and array.dtype.kind in "iu" and bool(array.dtype.itemsize < 4)


def _viewed(array: Array) -> Array:
    # MPI can't compare bools for a minimum or maximum, so pass them as the integers 0 and 1.
    return array.view("uint8") if array.dtype.kind == "b" else array
