"""The carrier of the engine's messages and arrays: MPI (`mpi_transport.py`), or torch's Gloo (`gloo_transport.py`).

One transport belongs to one process set and is used by one thread at a time. Arrays are contiguous NumPy arrays, and
all ranks call the same operation with the same shapes, in the same order: the engine has seen to that. A rank that is
gone shows as `ShutDownError`, or not at all (MPI): `liveness.py` looks after that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paceline.system import processes

#: Each rank reads all of the segments: with more ranks than this a reduction by MPI reads less.
MOST_RANKS = 4
_NAME = "paceline-segments"
_TOKEN_BYTES = 16
#: Before the segment's content: the token, and room, so that arrays begin at a page.
_HEAD_BYTES = mmap.PAGESIZE


class Transport(Protocol):
    """The ranks of one process set. rank, size: within it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    # Messages: any rank, at any time, while others do something else.

    def send(self, data: bytes, rank: int) -> None:
        """Send a message, without waiting for anybody to take it."""

    def receive(self) -> tuple[int, Any] | None:
        """The sender and the bytes of a message that has come; None: there is none."""

    # Arrays: every rank.

    def allreduce(self, source: Any, target: Any, op: str) -> None:
        """Fill the flat `target` with the ranks' `source` arrays, reduced; both may be the same array."""

    def reducescatter(self, source: Any, target: Any, counts: Sequence[int], op: str) -> None:
        """Fill the flat `target` with this rank's `counts[rank]` elements of the reduced `source`."""

    def allgather(self, array: Any, result: Any, rows: Sequence[int]) -> None:
        """Fill `result` with all ranks' rows, which number `rows[rank]` on each, and are not empty."""

    def broadcast(self, array: Any, root: int) -> None:
        """Replace the flat array of bytes by the root's."""

    def alltoall(self, array: Any, sent: Sequence[int], result: Any, received: Sequence[int]) -> None:
        """Fill `result` with the rows, not empty, that each rank sends here; `sent[k]` rows of `array` go to rank k."""

    def exchange(self, array: Any, other: Any, partner: int) -> None:
        """Fill the flat `other` with the partner's `array`; two ranks call it with each other."""

    def share_segments(self, size: int) -> SharedSegments | None:
        """Memory that all ranks see, `size` bytes for each to fill; None where there is none. Every rank calls it."""

    # Life.

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value."""

    def split(self, members: Sequence[int], number: int) -> Transport | None:
        """The transport of these ranks, None on the others. Every rank calls it, with the same members and number."""

    def watched(self) -> dict[int, int]:
        """File descriptor -> rank whose end makes it hang up. Whoever looks must not read from them."""

    def close(self) -> None:
        """Let the last messages arrive, and free everything. Every rank, after the last operation."""

    def abandon(self, reason: str) -> None:
        """Let go in the middle of something, and tell the others why, as far as that is possible. From any thread."""


class SharedSegments:
    """Segments of `size` bytes, two of each rank, A and B, used in turn.

        rank 0   fill A0 | meet | read A0 A1, fill B0 | meet | read B0 B1, fill A0 | meet
        rank 1   fill A1 | meet | read A0 A1, fill B1 | meet | read B0 B1, fill A1 | meet

    Rank 0 fills A0 again after the second meeting, to which rank 1 came when it had read A0. So one meeting for each buffer
    is enough, and with one segment each it would take two. A segment has one writer. The meeting also orders memory: on one
    machine MPI's barrier goes through shared memory, with fences, or through the kernel, so what was stored before it is seen
    after it.
    """

    def __init__(self, maps: list[mmap.mmap], size: int, rank: int, barrier: Callable[[], object]) -> None:
        self.size, self.rank = size, rank
        self._maps, self._barrier, self._turn = maps, barrier, 0

    def fill(self, dtype: Any) -> Any:
        """This rank's segment, a flat array, to be filled before the ranks meet."""
        return self._segment(self.rank, dtype)

    def meet(self, dtype: Any) -> list[Any]:
        """Wait for all ranks, then return each one's segment as it has filled it, in the order of the ranks.

        They may be read until the next meeting.
        """
        self._barrier()
        found = [self._segment(rank, dtype) for rank in range(len(self._maps))]
        self._turn ^= 1
        return found

    def close(self) -> None:
        """Give the memory back; others keep what they see."""
        for one in self._maps:
            with contextlib.suppress(BufferError):  # an error's traceback may still hold an array of it
                one.close()

    def _segment(self, rank: int, dtype: Any) -> Any:
        import numpy

        start = _HEAD_BYTES + self._turn * self.size
        return numpy.frombuffer(self._maps[rank], dtype, self.size // dtype.itemsize, start)


def share_segments(
    rank: int, ranks: int, gather: Callable[[Any], list[Any]], barrier: Callable[[], object], size: int
) -> SharedSegments | None:
    """The segments of `ranks` ranks, None where they do not all see one memory, or have no core each. Every rank has to call it.

    gather: gives every rank's value. barrier: returns when every rank has called it. size: of a segment, in bytes.
    """
    if ranks > MOST_RANKS:
        return None
    token, fd = secrets.token_bytes(_TOKEN_BYTES), -1
    maps: list[mmap.mmap] = []
    try:
        # OSError: there are no more files, or there is no more memory. AttributeError: not Linux. The rank goes on to `gather`
        # all the same, for the others wait for it there.
        with contextlib.suppress(OSError, AttributeError):
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.ftruncate(fd, _HEAD_BYTES + 2 * size)
            os.pwrite(fd, token, 0)
        told = gather((token, os.getpid(), fd))
        with contextlib.suppress(OSError, ValueError):
            maps = [_mapped(one, _HEAD_BYTES + 2 * size, mine=other == rank) for other, one in enumerate(told)]
        # After this second exchange each may close its file: all have opened it by then, or never will. Ranks that share a
        # core wait better in MPI.
        is_seen = all(gather(len(maps) == ranks <= processes.core_count()))
    finally:
        if fd >= 0:
            os.close(fd)
    return SharedSegments(maps, size, rank, barrier) if is_seen else None


def _mapped(told: tuple[bytes, int, int], size: int, *, mine: bool) -> mmap.mmap:
    """A rank's segments, those of others to be read only.

    Raises:
        OSError, ValueError: they can't be seen from here. On another machine another process may have that number, and
            whatever it has open there is not even to be opened.
    """
    token, pid, fd = told
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
