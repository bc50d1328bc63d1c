"""The engine's transport without MPI: arrays by torch's Gloo, messages by TCP.

Messages use TCP, because the engine needs a non-blocking receive, which Gloo lacks. This module does not touch torch's
default process group, so a script may create that group at any time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.collectives import links, numbers
from paceline.collectives.errors import LostRankError, ShutDownError
from paceline.collectives.links import PeerLink
from paceline.collectives.rendezvous import Meeting

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Work

    from paceline.collectives.numbers import Array
    from paceline.collectives.transport import SharedSegments

_LEAVE_S, _WHY_S = 5.0, 0.5
#: Two messages between transports. _FAILED: the sender has failed, and the reason follows. _BYE: the sender has finished.
_FAILED, _BYE = b"!", b""
#: If ranks have unequal numbers of rows, pad all arrays to the longest, up to this total size. Beyond it, each rank broadcasts.
_PADDED_BYTES = 1 << 16
_EXCHANGE_TAG = 3


class GlooTransport:
    """Gloo's group and the TCP connections between the ranks of a process set.

    All ranks of the set create it at the same time. `ranks` has the world ranks of the set, for error messages.

    Raises:
        CollectivesError: The other ranks did not connect in time, or cannot be reached.
    """

    def __init__(self, meeting: Meeting, ranks: Sequence[int]) -> None:
        import torch
        from torch.distributed import ProcessGroupGloo

        self.rank, self.size = meeting.rank, meeting.size
        self._torch = torch
        self._meeting = meeting
        self._ranks = tuple(ranks)
        self._gathered = itertools.count()
        self._lock = threading.Lock()
        self._reason: str | None = None
        with meeting.translated("connect to the other ranks"):
            self._links = _star(meeting)
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._devices = [meeting.device()]
            options._timeout = meeting.operation_timeout
            # One Gloo thread is enough, because operations run one at a time.
            options._threads = 1
            # Keep a reference to the store: torch keeps only its C++ part, but its Python part signs and verifies the values.
            self._store = meeting.store("gloo")
            self._group: Any = gloo(self._store, self.rank, self.size, options)
        self._poll = select.poll()
        for link in self._links.values():
            self._poll.register(link.fileno(), select.POLLIN)
        self._rank_of = {link.fileno(): rank for rank, link in self._links.items()}

    def send(self, data: bytes, rank: int) -> None:
        try:
            link = self._links[rank]
            link.send(data)
            # The first rank must send the whole response before it starts the operation: in the operation it waits for the other
            # ranks, which need the response first. Other ranks send the rest of a message in `receive`.
            while self.rank == 0 and not link.flush():
                links.wait([link], 1.0)
        except OSError as error:
            raise self._gone(rank, error) from error

    def receive(self) -> tuple[int, bytes] | None:
        # First return messages that are already buffered, because poll only reports data that is still in the kernel.
        for rank, link in self._links.items():
            if link.has_message():
                return self._taken(rank, link)
            if link.has_unsent():
                with contextlib.suppress(OSError):
                    link.flush()
        for fd, _ in self._poll.poll(0):
            rank = self._rank_of[fd]
            taken = self._taken(rank, self._links[rank])
            if taken is not None:
                return taken
        return None

    def _taken(self, rank: int, link: PeerLink) -> tuple[int, bytes] | None:
        try:
            message = link.receive()
        except (OSError, EOFError) as error:
            raise self._gone(rank, error) from error
        if message is not None and message.startswith(_FAILED):
            raise ShutDownError(f"rank {self._ranks[rank]} has given up: {message[1:].decode(errors='replace')}")
        return None if message is None else (rank, message)

    def _gone(self, rank: int, error: BaseException) -> ShutDownError:
        return LostRankError(
            f"rank {self._ranks[rank]} is gone: the connection to it has ended ({error})", self._ranks[rank]
        )

    def allreduce(self, source: Array, target: Array, op: str) -> None:
        if source is not target:
            target[...] = source
        self._reduce(target, op)

    def reducescatter(self, source: Array, target: Array, counts: Sequence[int], op: str) -> None:
        import numpy

        # Each rank receives only the rows that it keeps, and sums them. This takes half the traffic of an all-reduce.
        parts = numpy.empty((self.size, target.size), target.dtype)
        sent = [count * source.itemsize for count in counts]
        self._alltoall(_bytes(source), sent, _bytes(parts), [target.nbytes] * self.size)
        numbers.ufunc(op, target.dtype).reduce(parts, axis=0, dtype=target.dtype, out=target)

    def allgather(self, array: Array, result: Array, rows: Sequence[int]) -> None:
        import numpy

        row_bytes = result.nbytes // result.shape[0]
        most = max(rows)
        whole, ends = _bytes(result), itertools.accumulate(count * row_bytes for count in rows)
        parts = [whole[end - count * row_bytes : end] for count, end in zip(rows, ends, strict=True)]
        if min(rows) == most:
            self._run("allgather", lambda g: g._allgather_base(self._tensor(whole), self._tensor(_bytes(array))))
        # Gloo gathers only parts of equal size. If padding adds little, pad the parts. Otherwise each rank broadcasts its part.
        elif most * self.size * row_bytes <= max(2 * whole.size, _PADDED_BYTES):
            padded = numpy.zeros(most * row_bytes, numpy.uint8)
            padded[: array.nbytes] = _bytes(array)
            everything = numpy.empty((self.size, most * row_bytes), numpy.uint8)
            self._run("allgather", lambda g: g._allgather_base(self._tensor(_bytes(everything)), self._tensor(padded)))
            for part, sent in zip(parts, everything, strict=True):
                part[...] = sent[: part.size]
        else:
            parts[self.rank][...] = _bytes(array)
            for rank, part in enumerate(parts):
                if part.size:
                    self.broadcast(part, rank)

    def broadcast(self, array: Array, root: int) -> None:
        self._run("broadcast", lambda group: group.broadcast(self._tensor(array), root))

    def alltoall(self, array: Array, sent: Sequence[int], result: Array, received: Sequence[int]) -> None:
        row_bytes = array.itemsize * math.prod(array.shape[1:])
        out = [count * row_bytes for count in sent]
        self._alltoall(_bytes(array)[: sum(out)], out, _bytes(result), [count * row_bytes for count in received])

    def exchange(self, array: Array, other: Array, partner: int) -> None:
        def both(group: Any) -> Work:
            # Start to receive before sending. Both partners run this code, so if both sent first, each would wait for the other.
            received: Work = group.recv([self._tensor(other)], partner, _EXCHANGE_TAG)
            group.send([self._tensor(array)], partner, _EXCHANGE_TAG).wait()
            return received

        self._run("exchange", both)

    def _alltoall(self, source: Array, sent: Sequence[int], target: Array, received: Sequence[int]) -> None:
        self._run(
            "alltoall",
            lambda g: g.alltoall_base(self._tensor(target), self._tensor(source), list(received), list(sent)),
        )

    def _reduce(self, array: Array, op: str) -> None:
        """All-reduce the array in place, in a dtype that Gloo supports."""
        import numpy

        kind, name = array.dtype.kind, array.dtype.name
        if kind == "b":
            # As in NumPy, a sum of bools is "any", and a product is "all".
            self._gloo(array.view(numpy.uint8), {"sum": "max", "product": "min"}.get(op, op))
        elif kind == "c" and op == "sum":
            self._gloo(array.view(f"float{array.itemsize * 4}"), op)
        elif name in ("int16", "uint16", "uint32"):
            wide = array.astype(numpy.int64 if name == "uint32" else numpy.int32)
            self._gloo(wide, op)
            array[...] = wide.astype(array.dtype)
        elif name == "uint64":
            # As int64, sums and products are the same modulo 2^64. For min and max, flip the top bit to keep the order.
            bits = array.view(numpy.int64)
            if op in ("min", "max"):
                array ^= numpy.uint64(1 << 63)
            self._gloo(bits, op)
            if op in ("min", "max"):
                array ^= numpy.uint64(1 << 63)
        elif name in ("float32", "float64", "int8", "uint8", "int32", "int64"):
            self._gloo(array, op)
        else:
            everything = numpy.empty((self.size, array.size), array.dtype)
            self.allgather(array.reshape(1, -1), everything, [1] * self.size)
            numbers.ufunc(op, array.dtype).reduce(everything, axis=0, dtype=array.dtype, out=array)

    def _gloo(self, array: Array, op: str) -> None:
        from torch.distributed import ReduceOp

        kinds = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "product": ReduceOp.PRODUCT}
        self._run("allreduce", lambda group: group.allreduce(self._tensor(array), kinds[op]))

    def _run(self, what: str, start: Callable[[Any], Work]) -> None:
        # Another thread may set `_group` to None meanwhile (`abandon`). This reference keeps the group alive during the call.
        group = self._group
        if group is None:
            raise ShutDownError(self._reason or "the transport was closed")
        try:
            start(group).wait()
        except RuntimeError as error:
            self._say_why()
            raise ShutDownError(f"{what} over Gloo has failed in the middle: {_short(error)}") from error

    def _say_why(self) -> None:
        """Wait shortly for another rank's report of a failure, and raise this failure."""
        end_s = time.monotonic() + _WHY_S
        while self._reason is None and time.monotonic() < end_s:
            for rank, link in self._links.items():
                while self._taken(rank, link) is not None:
                    pass
            links.wait(self._links.values(), end_s - time.monotonic())

    def _tensor(self, array: Array) -> torch.Tensor:
        return self._torch.from_numpy(array if array.flags.writeable else array.copy())

    def share_segments(self, size: int) -> SharedSegments | None:
        # Shared memory would need a barrier for each buffer, and a barrier over TCP is too slow for that.
        return None

    def gather_objects(self, value: object) -> list[Any]:
        # Use new keys for each call, because the store keeps the values of earlier calls.
        store = self._meeting.signed(f"objects{next(self._gathered)}")
        with self._meeting.translated("hear from the other ranks"):
            store.set(str(self.rank), value)
            return [store.get(str(rank)) for rank in range(self.size)]

    def split(self, members: Sequence[int], number: int) -> GlooTransport | None:
        if self.rank not in members:
            return None
        return GlooTransport(self._meeting.part(f"set{number}", members), [self._ranks[rank] for rank in members])

    def watched(self) -> dict[int, int]:
        return {link.fileno(): rank for rank, link in self._links.items()}

    def close(self) -> None:
        # A rank that closes its connections too early would make others lose their last arrays. So the first rank waits for a
        # goodbye message from every other rank, and then sends its own goodbye to all.
        end_s = time.monotonic() + _LEAVE_S
        if self.rank == 0:
            self._hear(end_s)
        self._tell(_BYE)
        if self.rank != 0:
            self._hear(end_s)
        while not all(self._flushed(link) for link in self._links.values()) and time.monotonic() < end_s:
            time.sleep(0.001)
        self._let_go()

    def abandon(self, reason: str) -> None:
        # Set the reason before connections close, so that `_say_why` can report it. Keep the reason of the first call.
        with self._lock:
            first, self._reason = self._reason is None, self._reason or reason
        if first:
            self._tell(_FAILED + reason.encode())
            self._let_go()

    def _tell(self, data: bytes) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(data)

    def _hear(self, end_s: float) -> None:
        """Wait until `end_s`, or until all other ranks have shut down or disconnected."""
        waiting = dict(self._links)
        while True:
            for rank, link in list(waiting.items()):
                try:
                    while (message := link.receive()) is not None:
                        if message == _BYE:
                            del waiting[rank]
                            break
                except (OSError, EOFError):
                    del waiting[rank]
            if not waiting or time.monotonic() >= end_s:
                return
            links.wait(waiting.values(), end_s - time.monotonic())

    @staticmethod
    def _flushed(link: PeerLink) -> bool:
        try:
            return link.flush()
        except OSError:
            return True

    def _let_go(self) -> None:
        # Dropping the last reference closes the group's connections, so that ranks in the middle of an operation get an error.
        self._group = None
        for link in self._links.values():
            link.close()


def _star(meeting: Meeting) -> dict[int, PeerLink]:
    if meeting.size == 1:
        return {}
    store = meeting.signed("links")
    if meeting.rank == 0:
        nonce = secrets.token_bytes(32)
        with links.listen(meeting.address) as server:
            store.set("server", [meeting.address, server.getsockname()[1], nonce.hex()])
            return links.accept(server, meeting.link_key(nonce), range(1, meeting.size), meeting.timeout_s)
    address, port, nonce_text = store.get("server")
    key = meeting.link_key(bytes.fromhex(nonce_text))
    return {0: links.connect(address, port, key, meeting.rank, meeting.timeout_s)}


def _short(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else repr(error)
    return re.sub(r"^\[\S+\] ", "", text).partition(". This is typically")[0]


def _bytes(array: Array) -> Array:
    import numpy

    return array.reshape(-1).view(numpy.uint8)
