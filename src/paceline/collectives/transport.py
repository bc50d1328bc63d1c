"""The interface that carries the engine's messages and arrays, and memory that ranks on one machine share.

One transport belongs to one process set, and one thread at a time uses it. Arrays are contiguous NumPy arrays. All
ranks call the same operations with the same shapes in the same order, because the engine has negotiated them. If a rank
dies, a call raises `ShutDownError`. With MPI the call may hang instead, so `liveness.py` detects dead ranks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paceline.collectives.numbers import Array, DType
from paceline.system import processes

#: Maximum number of ranks that share memory. Each rank reads all segments, so with more ranks MPI's own reduction reads less.
MOST_RANKS = 4
_NAME = "paceline-segments"
_TOKEN_BYTES = 16
#: Size of the part before a segment's content. It contains a token, and fills a page, so that the content begins at a page.
_HEAD_BYTES = mmap.PAGESIZE


class Transport(Protocol):
    """The connections between the ranks of one process set."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, data: bytes, rank: int) -> None:
        """Send a message without waiting for its receiver."""

    def receive(self) -> tuple[int, bytes | bytearray] | None:
        """Return (sender, bytes) of the next message, or None if none has arrived."""

    def allreduce(self, source: Array, target: Array, op: str) -> None:
        """Fill `target` with the reduction of all ranks' `source`.

        Both are flat, and may be the same array.
        """

    def reducescatter(self, source: Array, target: Array, counts: Sequence[int], op: str) -> None:
        """Fill `target` with this rank's part of the reduced `source`.

        Both are flat. The part has `counts[rank]` elements.
        """

    def allgather(self, array: Array, result: Array, rows: Sequence[int]) -> None:
        """Fill `result` with all ranks' rows, `rows[rank]` from each."""

    def broadcast(self, array: Array, root: int) -> None:
        """Replace the flat array of bytes by the root's array."""

    def alltoall(self, array: Array, sent: Sequence[int], result: Array, received: Sequence[int]) -> None:
        """Send `sent[k]` rows to rank k. Fill `result` with the received rows."""

    def exchange(self, array: Array, other: Array, partner: int) -> None:
        """Send the flat `array` to the partner, and fill `other` with the partner's array."""

    def share_segments(self, size: int) -> SharedSegments | None:
        """Open memory shared by all ranks, one segment of `size` bytes each.

        Every rank must call this. Return None if the ranks cannot share memory.
        """

    def gather_objects(self, value: object) -> list[Any]:
        """Return every rank's value, by rank. Every rank must call this."""

    def split(self, members: Sequence[int], number: int) -> Transport | None:
        """Return a transport between the ranks `members`, else None. Every rank must call this."""

    def watched(self) -> dict[int, int]:
        """Return descriptors to poll for ends of other ranks, as {descriptor: rank}.

        A hang-up means that the rank has ended. Callers must not read from the descriptors.
        """

    def close(self) -> None:
        """Deliver the last messages, and free all resources."""

    def abandon(self, reason: str) -> None:
        """Close the connections even in the middle of an operation.

        The other ranks receive the reason if possible. Any thread may call this method.
        """


class Alone:
    """The transport of a process set with one rank."""

    rank, size = 0, 1

    def send(self, data: bytes, rank: int) -> None: ...

    def receive(self) -> None: ...

    def allreduce(self, source: Array, target: Array, op: str) -> None:
        if source is not target:
            target[...] = source

    def reducescatter(self, source: Array, target: Array, counts: Sequence[int], op: str) -> None:
        target[...] = source

    def allgather(self, array: Array, result: Array, rows: Sequence[int]) -> None:
        result[...] = array

    def broadcast(self, array: Array, root: int) -> None: ...

    def alltoall(self, array: Array, sent: Sequence[int], result: Array, received: Sequence[int]) -> None:
        result[...] = array[: result.shape[0]]

    def exchange(self, array: Array, other: Array, partner: int) -> None: ...

    def share_segments(self, size: int) -> None: ...

    def gather_objects(self, value: object) -> list[Any]:
        return [value]

    def split(self, members: Sequence[int], number: int) -> None: ...

    def watched(self) -> dict[int, int]:
        return {}

    def close(self) -> None: ...

    def abandon(self, reason: str) -> None: ...


class SharedSegments:
    """Two segments of shared memory per rank, used alternately.

        rank 0   fill A0 | meet | read A0 A1, fill B0 | meet | read B0 B1, fill A0 | meet
        rank 1   fill A1 | meet | read A0 A1, fill B1 | meet | read B0 B1, fill A1 | meet

    A0 and B0 are rank 0's segments; "meet" is a barrier. Rank 0 fills A0 for the second time after the second meeting,
    which rank 1 joined after reading A0. So one meeting per buffer is enough; with one segment per rank, two are
    needed. Only a segment's own rank writes to it. Writes before a meeting are visible after the meeting.

    The segments are anonymous files (memfd_create(2)), which other ranks open through /proc/<pid>/fd. A segment
    disappears when the last process that uses it ends.
    """

    def __init__(self, maps: list[mmap.mmap], size: int, rank: int, barrier: Callable[[], object]) -> None:
        self.size, self.rank = size, rank
        self._maps, self._barrier, self._turn = maps, barrier, 0

    def fill(self, dtype: DType) -> Array:
        """Return this rank's shared memory as an array, to fill before calling `meet`."""
        return self._segment(self.rank, dtype)

    def meet(self, dtype: DType) -> list[Array]:
        """Wait until all ranks have filled their shared memory. Return every rank's array."""
        # After this barrier, other ranks may read this rank's segment until the next call of `meet`.
        self._barrier()
        segments = [self._segment(rank, dtype) for rank in range(len(self._maps))]
        self._turn ^= 1
        return segments

    def close(self) -> None:
        for segments in self._maps:
            with contextlib.suppress(BufferError):  # an error's traceback may still refer to an array in this memory
                segments.close()

    def _segment(self, rank: int, dtype: DType) -> Array:
        import numpy

        start = _HEAD_BYTES + self._turn * self.size
        return numpy.frombuffer(self._maps[rank], dtype, self.size // dtype.itemsize, start)


def share_segments(
    rank: int, ranks: int, gather: Callable[[object], list[Any]], barrier: Callable[[], object], size: int
) -> SharedSegments | None:
    """Open segments of memory that all ranks share.

    Every rank must call this. Return None unless all ranks, at most `MOST_RANKS`, are on one machine with a core for each.
    `gather` returns every rank's value. `barrier` returns when every rank has called `barrier`.
    """
    if ranks > MOST_RANKS:
        return None
    token, fd = secrets.token_bytes(_TOKEN_BYTES), -1
    maps: list[mmap.mmap] = []
    try:
        # OSError means too few files or too little memory. AttributeError means that the system is not Linux. After either error,
        # this rank must still call `gather`, because the other ranks wait there.
        with contextlib.suppress(OSError, AttributeError):
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.ftruncate(fd, _HEAD_BYTES + 2 * size)
            os.pwrite(fd, token, 0)
        files = gather((token, os.getpid(), fd))
        with contextlib.suppress(OSError, ValueError):
            maps = [_mapped(file, _HEAD_BYTES + 2 * size, mine=other == rank) for other, file in enumerate(files)]
        # After this second exchange, every rank has opened the files or has failed, so each rank may close its file. With more
        # ranks than cores, don't share memory: a rank that waits in MPI's calls yields its core better.
        is_seen = all(gather(len(maps) == ranks <= processes.core_count()))
    finally:
        if fd >= 0:
            os.close(fd)
    return SharedSegments(maps, size, rank, barrier) if is_seen else None


def _mapped(file: tuple[bytes, int, int], size: int, *, mine: bool) -> mmap.mmap:
    token, pid, fd = file
    path = f"/proc/{pid}/fd/{fd}"
    if _NAME not in os.readlink(path):
        raise ValueError("another file")
    opened = os.open(path, (os.O_RDWR if mine else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if os.pread(opened, _TOKEN_BYTES, 0) != token:
            raise ValueError("another world's")
        return mmap.mmap(opened, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if mine else 0))
    finally:
        os.close(opened)
