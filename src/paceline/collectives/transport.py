"""The interface that carries the engine's messages and arrays, and memory shared by ranks of one machine.

One transport belongs to one process set, and one thread at a time uses it. Arrays are contiguous NumPy arrays. All ranks call
the same operation with the same shapes in the same order, as the engine has negotiated. A dead rank raises `ShutDownError`, or
goes unnoticed (MPI): `liveness.py` watches for that.
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

#: Most ranks that share segments. Each rank reads all segments, so with more ranks a reduction by MPI reads less.
MOST_RANKS = 4
_NAME = "paceline-segments"
_TOKEN_BYTES = 16
#: Size before the segment's content: it holds the token, and lets arrays begin at a page.
_HEAD_BYTES = mmap.PAGESIZE


class Transport(Protocol):
    """The ranks of one process set."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, data: bytes, rank: int) -> None:
        """Send a message without waiting for its receiver."""

    def receive(self) -> tuple[int, bytes | bytearray] | None:
        """Return the sender and bytes of the next message, or None if none has arrived."""

    def allreduce(self, source: Array, target: Array, op: str) -> None:
        """Fill `target` with the reduced `source` arrays of all ranks; both are flat, perhaps the same."""

    def reducescatter(self, source: Array, target: Array, counts: Sequence[int], op: str) -> None:
        """Fill `target` with this rank's part of the reduced `source`.

        Both are flat. The part has `counts[rank]` elements.
        """

    def allgather(self, array: Array, result: Array, rows: Sequence[int]) -> None:
        """Fill `result` with all ranks' rows, `rows[rank]` from each."""

    def broadcast(self, array: Array, root: int) -> None:
        """Replace the flat array of bytes by the root's array."""

    def alltoall(self, array: Array, sent: Sequence[int], result: Array, received: Sequence[int]) -> None:
        """Fill `result` with the rows that the ranks send here. `sent[k]` rows of `array` go to rank k."""

    def exchange(self, array: Array, other: Array, partner: int) -> None:
        """Fill the flat `other` with the partner's `array`, and send it this rank's."""

    def share_segments(self, size: int) -> SharedSegments | None:
        """Open memory that all ranks share, or return None. Each rank has `size` bytes. Every rank calls it."""

    def gather_objects(self, value: object) -> list[Any]:
        """Return every rank's value. Every rank calls it."""

    def split(self, members: Sequence[int], number: int) -> Transport | None:
        """Return the transport of these ranks, or None on other ranks. Every rank calls it alike."""

    def watched(self) -> dict[int, int]:
        """Return {file descriptor: rank}; each hangs up when its rank ends. Callers must not read from them."""

    def close(self) -> None:
        """Deliver the last messages and free all resources."""

    def abandon(self, reason: str) -> None:
        """Close the connections even in the middle of an operation.

        The other ranks receive the reason if possible. Any thread may call it.
        """


class Alone:
    """The transport of a set of one rank."""

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
    """Two segments for each rank, A and B, used in turn.

        rank 0   fill A0 | meet | read A0 A1, fill B0 | meet | read B0 B1, fill A0 | meet
        rank 1   fill A1 | meet | read A0 A1, fill B1 | meet | read B0 B1, fill A1 | meet

    Rank 0 fills A0 again after the second meeting, to which rank 1 came after it had read A0. So one meeting for each buffer is
    enough; one segment for each rank would take two. A segment has one writer. The meeting also orders memory: MPI's barrier on
    one machine goes through shared memory with fences, or through the kernel, so earlier stores are visible after it.

    Fused arrays have to be copied together anyway. In shared segments the other ranks can sum them directly into the results,
    which saves half of the passes over memory. The segments are anonymous files (memfd_create(2)) that the others open through
    /proc/<pid>/fd: they have no name, and disappear with the last process that holds them.
    """

    def __init__(self, maps: list[mmap.mmap], size: int, rank: int, barrier: Callable[[], object]) -> None:
        self.size, self.rank = size, rank
        self._maps, self._barrier, self._turn = maps, barrier, 0

    def fill(self, dtype: DType) -> Array:
        """Return this rank's segment, which the caller fills before `meet`."""
        return self._segment(self.rank, dtype)

    def meet(self, dtype: DType) -> list[Array]:
        """Return each rank's segment once all ranks have filled theirs."""
        # The segments are readable until the next meeting.
        self._barrier()
        segments = [self._segment(rank, dtype) for rank in range(len(self._maps))]
        self._turn ^= 1
        return segments

    def close(self) -> None:
        """Release the memory; other ranks keep their own mappings."""
        for segments in self._maps:
            with contextlib.suppress(BufferError):  # an error's traceback may still hold an array in this memory
                segments.close()

    def _segment(self, rank: int, dtype: DType) -> Array:
        import numpy

        start = _HEAD_BYTES + self._turn * self.size
        return numpy.frombuffer(self._maps[rank], dtype, self.size // dtype.itemsize, start)


def share_segments(
    rank: int, ranks: int, gather: Callable[[object], list[Any]], barrier: Callable[[], object], size: int
) -> SharedSegments | None:
    """Open the segments of `ranks` ranks, or return None unless they share one memory and have a core each.

    Every rank has to call it.

    `gather` returns every rank's value, and `barrier` returns when every rank has called it.
    """
    if ranks > MOST_RANKS:
        return None
    token, fd = secrets.token_bytes(_TOKEN_BYTES), -1
    maps: list[mmap.mmap] = []
    try:
        # OSError: no more files or memory. AttributeError: not Linux. After an error the rank still calls `gather`,
        # where the others wait for it.
        with contextlib.suppress(OSError, AttributeError):
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.ftruncate(fd, _HEAD_BYTES + 2 * size)
            os.pwrite(fd, token, 0)
        files = gather((token, os.getpid(), fd))
        with contextlib.suppress(OSError, ValueError):
            maps = [_mapped(file, _HEAD_BYTES + 2 * size, mine=other == rank) for other, file in enumerate(files)]
        # After this second exchange each rank may close its file: all ranks have opened it by then, or never will.
        # Ranks that share a core do not use segments, because MPI's calls yield the core better.
        is_seen = all(gather(len(maps) == ranks <= processes.core_count()))
    finally:
        if fd >= 0:
            os.close(fd)
    return SharedSegments(maps, size, rank, barrier) if is_seen else None


def _mapped(file: tuple[bytes, int, int], size: int, *, mine: bool) -> mmap.mmap:
    """Map a rank's segments into memory, read-only for those of other ranks."""
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
