"""The carrier of the engine's messages and arrays: MPI (`mpi_transport.py`), or torch's Gloo (`gloo_transport.py`).

One transport belongs to one process set and is used by one thread at a time. Arrays are contiguous NumPy arrays, and
all ranks call the same operation with the same shapes, in the same order: the engine has seen to that. A rank that is
gone shows as `ShutDownError`, or not at all (MPI): `liveness.py` looks after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paceline.collectives.shared_memory import SharedSegments


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
