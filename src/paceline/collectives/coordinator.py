"""The negotiation of one process set: which operations all its ranks have requested. Needs no transport.

Every rank sends its requests to the first rank of the set immediately. The first rank sends back one list of the
operations that every rank has requested, and all ranks perform them in that order. When all ranks have requested a name
twice, the name gets a number, its slot. Then ranks that repeat this request send and receive only the slot.

    rank 0   submits a, b          -> [request a, request b]
    rank 1   submits b             -> [request b]               -> everyone: [b]
    rank 1   submits a             -> [request a]               -> everyone: [a]
    later    both submit a and b   -> [7, 8] and [8, 7]         -> everyone: [8, 7]

A small reduction is done inside the negotiation: each rank's array travels with its request, and the sum with the
response. This takes half the time of a negotiation followed by a reduction. A rank sends the array if it requests a
single operation, as a blocking call does. Many small arrays are faster in one fused buffer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from paceline.collectives import numbers
from paceline.collectives.numbers import Array
from paceline.collectives.request import ALLREDUCE, JOIN, Agreement, CollectiveTask, Fields, Key, Request, agree

#: Arrays of at most this size are sent within their request. The value is a guess: rank 0 receives such arrays of all ranks.
INLINE_LIMIT_BYTES = 8 << 10


class Message(NamedTuple):
    """A rank's message to the first rank of its process set.

    Attributes:
        epoch: The version of the slot numbering, which the first rank increments to discard all slots.
        slots: Slot numbers, each in place of a request that repeats an earlier request exactly.
        leaving: Whether the rank shuts down.
        payload: The bytes of the rank's array if the message requests one small reduction, else None.
    """

    epoch: int
    slots: tuple[int, ...] = ()
    requests: tuple[Request, ...] = ()
    leaving: bool = False
    payload: bytes | None = None


class Response(NamedTuple):
    """The next operations, which all ranks perform in this order.

    `slots` has the slot numbers of repeated operations. They come before the operations in `agreements`. A new `epoch`
    makes all slot numbers invalid after this response. `end` is the reason why no operation follows, or None. `results`
    has (position in the order, result) of each small reduction.
    """

    epoch: int
    slots: tuple[int, ...] = ()
    agreements: tuple[Agreement, ...] = ()
    end: str | None = None
    results: tuple[tuple[int, bytes], ...] = ()


class Late(NamedTuple):
    """An overdue collective operation, which only some ranks have submitted.

    Ranks that have called `join` count neither as missing nor as submitted.
    """

    key: Key
    age_s: float
    missing: list[int]
    submitted: list[int]


class _Slot(NamedTuple):
    key: Key
    requests: dict[int, Request]


class Coordinator:
    """The first rank's collector of requests, which announces collectives that all ranks requested."""

    def __init__(self, size: int, cache_capacity: int) -> None:
        # Each rank is a bit of an integer. One comparison then tells whether all ranks have requested an operation.
        self._all = (1 << size) - 1
        self._size = size
        self._capacity = cache_capacity
        self._epoch = 0
        self._slots: list[_Slot] = []
        self._slot_of: dict[Key, int] = {}
        self._requested: list[int] = []  # slot (number of a repeated request) -> the ranks that have sent it, as bits
        self._open: dict[Key, dict[int, Request]] = {}
        self._since_s: dict[Key, float] = {}
        self._ready_slots: list[int] = []
        self._ready: dict[Key, None] = {}
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._joined = 0
        self._last_joined = -1
        self._old_slots: list[_Slot] = []
        self._payloads: dict[Key, dict[int, bytes]] = {}
        self._behind = 0  # ranks, as bits, that may still use the previous numbering (epoch) of slots
        self._full = False
        self._end: str | None = None
        self._left = 0
        #: Operation -> (rank, `time.monotonic`) of each rank's request, if `notes_arrivals`. `Negotiation` removes entries.
        self.arrivals: dict[Key, list[tuple[int, float]]] = {}
        self.notes_arrivals = False

    def receive(self, rank: int, message: Message) -> None:
        bit = 1 << rank
        if self.notes_arrivals:
            self._note(rank, message)
        if message.payload is not None:
            self._keep(rank, message, message.payload)
        if message.epoch != self._epoch:
            # The rank sent this message before it learned of the new epoch, so its slot numbers are of the old epoch.
            for slot in message.slots:
                key, requests = self._old_slots[slot]
                self._ask(rank, key, requests[rank])
        else:
            if self._behind:
                self._behind &= ~bit
            requested = self._requested
            for slot in message.slots:
                mask = requested[slot]
                key = self._slots[slot].key
                if not mask:
                    # Usually it is enough to count bits. If another rank has sent a full request for this operation, or a rank
                    # has joined, compare the requests one by one.
                    if key in self._open or self._joined:
                        self._ask(rank, key, self._slots[slot].requests[rank])
                        continue
                    self._since_s[key] = time.monotonic()
                requested[slot] = mask = mask | bit
                if mask == self._all:
                    requested[slot] = 0
                    del self._since_s[key]
                    self._ready_slots.append(slot)
        for request in message.requests:
            self._ask(rank, request.key, request)
        if message.leaving:
            self._left |= bit
            self.end(f"rank {rank} has shut down, at the end of its script or by its own call")

    @property
    def is_left_by_all(self) -> bool:
        """Whether all other ranks have shut down and send nothing more."""
        # Bit 0 is the first rank. The first rank runs this code, so it ignores its own bit.
        return self._left | 1 == self._all

    def end(self, reason: str) -> None:
        """Make the next response to the ranks the last one, with this reason."""
        if self._end is None:
            self._end = reason

    def respond(self) -> Response | None:
        """Return the collectives that every rank has requested, or None without any."""
        slots = tuple(self._ready_slots)
        self._ready_slots.clear()
        results: list[tuple[int, bytes]] = []
        # Arrays sent within requests have slot numbers of the present epoch. Reduce these arrays before a new epoch may begin.
        if self._payloads:
            self._fold(results, 0, [next(iter(self._slots[slot].requests.values())) for slot in slots])
        # Start a new epoch only when every rank has sent a message of this epoch. Until then, old slot numbers may be in flight.
        if self._full and not self._behind:
            self._start_epoch()
        agreements = tuple(self._settle(self._ready)) if self._ready else ()
        if not slots and not agreements and self._end is None:
            return None
        if self._payloads and agreements:
            wrong = {place for place, agreement in enumerate(agreements, len(slots)) if agreement.error is not None}
            self._fold(results, len(slots), [agreement.request for agreement in agreements], wrong)
        return Response(self._epoch, slots, agreements, self._end, tuple(results))

    def waiting(self, longer_than_s: float) -> list[Late]:
        """Return the collectives that have waited for ranks for `longer_than_s` or longer."""
        now_s = time.monotonic()
        late = []
        for key, since_s in self._since_s.items():
            if now_s - since_s >= longer_than_s:
                slot = self._slot_of.get(key, -1)
                requested = sum(1 << rank for rank in self._open[key]) if key in self._open else 0
                if not requested and slot >= 0:
                    requested = self._requested[slot]
                missing = [rank for rank in range(self._size) if not (requested | self._joined) & (1 << rank)]
                submitted = [rank for rank in range(self._size) if requested & (1 << rank)]
                late.append(Late(key, now_s - since_s, missing, submitted))
        return late

    def _note(self, rank: int, message: Message) -> None:
        now_s = time.monotonic()
        slots = self._slots if message.epoch == self._epoch else self._old_slots
        for key in [slots[slot].key for slot in message.slots] + [request.key for request in message.requests]:
            self.arrivals.setdefault(key, []).append((rank, now_s))

    def _keep(self, rank: int, message: Message, payload: bytes) -> None:
        if message.requests:
            key = message.requests[0].key
        else:
            slots = self._slots if message.epoch == self._epoch else self._old_slots
            key = slots[message.slots[0]].key
        self._payloads.setdefault(key, {})[rank] = payload

    def _fold(
        self, results: list[tuple[int, bytes]], begin: int, requests: Iterable[Request], wrong: Collection[int] = ()
    ) -> None:
        for place, request in enumerate(requests, begin):
            payloads = self._payloads.pop(request.key, None)
            if payloads is not None and len(payloads) == self._size and place not in wrong:
                results.append((place, inline_fold(request, [payloads[rank] for rank in range(self._size)])))

    def _ask(self, rank: int, key: Key, request: Request) -> None:
        if request.kind == JOIN:
            self._join(rank)
            return
        requests = self._open.get(key)
        if requests is None:
            requests = self._open[key] = {}
            # Keep an earlier time: a rank may have requested this operation by its slot number before.
            self._since_s.setdefault(key, time.monotonic())
            self._to_open(key, requests)
        requests[rank] = request
        self._check(key, requests)

    def _to_open(self, key: Key, requests: dict[int, Request]) -> None:
        """Add full requests to `requests`, in place of the slot numbers that ranks have sent."""
        slot = self._slot_of.get(key, -1)
        if slot >= 0 and self._requested[slot]:
            mask, self._requested[slot] = self._requested[slot], 0
            known = self._slots[slot].requests
            requests.update({rank: known[rank] for rank in range(self._size) if mask & (1 << rank)})

    def _write_out_all(self) -> None:
        for key in [self._slots[slot].key for slot, mask in enumerate(self._requested) if mask]:
            self._to_open(key, self._open.setdefault(key, {}))

    def _join(self, rank: int) -> None:
        self._joined |= 1 << rank
        self._last_joined = rank
        # `_check` covers only full requests, so convert requests by slot number to full requests.
        self._write_out_all()
        for key, requests in self._open.items():
            self._check(key, requests)
        if self._joined == self._all:
            self._ready[(JOIN, JOIN)] = None

    def _check(self, key: Key, requests: dict[int, Request]) -> None:
        if len(requests) == self._size or (
            self._joined and self._joined | sum(1 << rank for rank in requests) == self._all
        ):
            self._ready[key] = None

    def _settle(self, keys: Iterable[Key]) -> Iterable[Agreement]:
        self._ready = {}
        for key in keys:
            if key == (JOIN, JOIN):
                yield Agreement(Request(JOIN, JOIN), joined=self._last_joined)
                self._joined, self._last_joined = 0, -1
                continue
            requests = self._open.pop(key)
            self._since_s.pop(key, None)
            agreement = agree(requests, joined=len(requests) < self._size)
            if agreement.error is None and len(requests) == self._size:
                agreement = agreement._replace(slot=self._slot(key, requests))
            yield agreement

    def _slot(self, key: Key, requests: dict[int, Request]) -> int:
        """Return the number by which ranks may repeat these requests, or -1."""
        # Give no slot to a name at its first use: names that are new in each step would fill the cache. When the cache is full,
        # new names get no slots.
        slot = self._slot_of.get(key, -1)
        if slot >= 0:
            # A name keeps its slot number when the shape of its array changes. From now on the number stands for the new request.
            self._slots[slot] = _Slot(key, requests)
            return slot
        if not self._capacity:
            return -1
        if key not in self._seen:
            self._seen[key] = None
            # Forget the oldest name that was seen only once. Otherwise generated names would fill the memory.
            if len(self._seen) > 4 * self._capacity:
                self._seen.popitem(last=False)
            return -1
        if len(self._slots) >= self._capacity:
            self._full = True
            return -1
        self._slots.append(_Slot(key, requests))
        self._requested.append(0)
        self._slot_of[key] = len(self._slots) - 1
        return len(self._slots) - 1

    def _start_epoch(self) -> None:
        # Slot numbers of the old epoch may be in flight, so keep the old slots. The next epoch waits until they have arrived.
        self._write_out_all()
        self._old_slots, self._slots, self._slot_of, self._requested = self._slots, [], {}, []
        self._epoch += 1
        # Until a rank learns of the new epoch, it may send slot numbers of the old epoch.
        self._behind, self._full = self._all, False


class ResponseCache:
    """A rank's cache of agreed collectives, by the slot numbers that replace them in messages."""

    def __init__(self) -> None:
        self._epoch = 0
        self._numbers: dict[tuple[str, str], tuple[int, Request]] = {}
        self._agreements: dict[int, Agreement] = {}

    def known(self, fields: Fields) -> Request:
        """Return the cached request with these fields, or else a new request.

        Any thread may call this. With reused objects, Python's garbage collector does not run in each step.
        """
        # A single lookup needs no lock, because the thread that holds _turn changes single keys, or replaces the whole table.
        cached = self._numbers.get((fields[0], fields[1]))
        return cached[1] if cached is not None and cached[1] == fields else Request(*fields)

    def message(self, requests: Sequence[Request], leaving: bool = False, payload: bytes | None = None) -> Message:
        """Return a message with these requests for collectives. Cached requests become numbers."""
        slots, others = [], []
        for request in requests:
            known = self._numbers.get(request.key)
            if known is not None and known[1] == request:
                slots.append(known[0])
            else:
                others.append(request)
        return Message(self._epoch, tuple(slots), tuple(others), leaving, payload)

    def agreed(self, response: Response, own_request: Callable[[Key], Request | None]) -> list[Agreement]:
        """Return the collectives to perform, in the response's order. Record their numbers.

        `own_request` returns this rank's pending request for a key, or None if this rank has no such request.
        """
        known = [self._agreements[slot] for slot in response.slots]
        if response.epoch != self._epoch:
            # A new epoch makes old slot numbers invalid. `known` already has the agreements for these numbers.
            self._numbers, self._agreements, self._epoch = {}, {}, response.epoch
        for agreement in response.agreements:
            request = own_request(agreement.request.key) if agreement.slot >= 0 else None
            if request is not None:
                self._agreements[agreement.slot] = agreement
                self._numbers[request.key] = (agreement.slot, request)
        return [*known, *response.agreements]


def inline_payload(task: CollectiveTask) -> bytes | None:
    """Return the array to send within a small reduction's request, None for other tasks."""
    request = task.request
    if (
        request.kind != ALLREDUCE
        or request.grouped
        or request.op == "adasum"
        or task.arrays[0].nbytes > INLINE_LIMIT_BYTES
    ):
        return None
    array = task.arrays[0].reshape(-1)
    dtype = request.dtypes[0]
    if not numbers.is_half(dtype) and request.prescale == 1.0:
        return bytes(array)
    return bytes(numbers.summand(array, dtype, request.prescale))


def inline_fold(request: Request, payloads: Sequence[bytes]) -> bytes:
    """Reduce the arrays that all ranks have sent with this request."""
    import numpy

    dtype = request.dtypes[0]
    kind, op = numpy.dtype(numbers.sum_type(dtype)), numbers.operation(request.op, dtype)
    arrays = [numpy.frombuffer(data, kind) for data in payloads]
    with numpy.errstate(all="ignore"):
        whole = arrays[0]
        if len(arrays) > 1:
            whole = numbers.joined(numbers.ufunc(op, kind), arrays, numpy.empty_like(whole))
    return bytes(whole)


def inline_result(task: CollectiveTask, data: bytes, size: int) -> Array:
    """Convert a small reduction's result, `data`, to the task's output array."""
    import numpy

    request = task.request
    dtype = request.dtypes[0]
    out = numpy.empty_like(task.arrays[0]) if task.outs[0] is None else task.outs[0]
    divisor = numbers.divisor(request.op, dtype, size)
    target = out.reshape(-1)
    if numbers.is_half(dtype):
        reduced = numpy.frombuffer(bytearray(data), numpy.float32)
        numbers.scale(reduced, request.postscale, divisor)
        numbers.from_float32(reduced, target, dtype)
    else:
        target[...] = numpy.frombuffer(data, target.dtype)
        numbers.scale(target, request.postscale, divisor)
    return out
