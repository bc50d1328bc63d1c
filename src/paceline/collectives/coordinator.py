"""Which operations all ranks of a process set have asked for. Knows no transport: messages in, agreements out.

Every rank sends the first rank of the set what was submitted there, as soon as it was. What every rank has asked for
goes back to all as one list, which they work off in its order. A name that was agreed upon twice gets a number, its
slot; from then on a rank that asks for exactly the same again sends that number alone, and gets it back alone.

    rank 0   submits a, b          -> [request a, request b]
    rank 1   submits b             -> [request b]               -> everyone: [b]
    rank 1   submits a             -> [request a]               -> everyone: [a]
    later    both submit a and b   -> [7, 8] and [8, 7]         -> everyone: [8, 7]
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from paceline.collectives import numbers
from paceline.collectives.request import ALLREDUCE, JOIN, Agreement, CollectiveTask, Fields, Request, agree

Key = tuple[str, str]

#: The first rank takes so much from each of the others. A guess; from 16 KiB on two ranks are faster without.
INLINE_LIMIT_BYTES = 8 << 10


class Message(NamedTuple):
    """A message of a rank to the set's first one. epoch: which numbering its slots are of. leaving: it shuts down.

    payload: what the rank adds to the sum, when it asks for one small reduction.
    """

    epoch: int
    slots: tuple[int, ...] = ()
    requests: tuple[Request, ...] = ()
    leaving: bool = False
    payload: bytes | None = None


class Response(NamedTuple):
    """The first rank's message to all: the operations that they do next, numbers first, then full agreements, in this order.

    epoch: the numbering from now on; another one than before says that every number given until now is void, once the
    numbers in this response have been worked off. end: the reason why nothing more will be done. results: place in this
    list -> what came out, where nothing is left to be done.
    """

    epoch: int
    slots: tuple[int, ...] = ()
    agreements: tuple[Agreement, ...] = ()
    end: str | None = None
    results: tuple[tuple[int, bytes], ...] = ()


class Late(NamedTuple):
    """An operation that some ranks wait for. missing, submitted: ranks of the set; one that has joined is neither."""

    key: Key
    age_s: float
    missing: list[int]
    submitted: list[int]


class _Slot(NamedTuple):
    key: Key
    requests: dict[int, Request]


class Coordinator:
    """The state of the negotiation of one process set of `size` ranks."""

    def __init__(self, size: int, cache_capacity: int) -> None:
        # Ranks are the bits of one integer, so that "all of them" is one comparison however many there are.
        self._all = (1 << size) - 1
        self._size = size
        self._capacity = cache_capacity
        self._epoch = 0
        self._slots: list[_Slot] = []
        self._slot_of: dict[Key, int] = {}
        self._asked: list[int] = []  # of each slot, the ranks that asked for it, as bits
        self._open: dict[Key, dict[int, Request]] = {}
        self._since_s: dict[Key, float] = {}
        self._ready_slots: list[int] = []
        self._ready: dict[Key, None] = {}
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._joined = 0
        self._last_joined = -1
        self._old_slots: list[_Slot] = []
        self._payloads: dict[Key, dict[int, bytes]] = {}
        self._behind = 0  # ranks, as bits, that may still send numbers of the epoch before
        self._full = False
        self._end: str | None = None
        self._left = 0
        #: Operation -> which rank asked for it when (`time.monotonic`), if somebody wants to know. They take it out.
        self.arrivals: dict[Key, list[tuple[int, float]]] | None = None

    def receive(self, rank: int, message: Message) -> None:
        """Take in what a rank says."""
        bit = 1 << rank
        if self.arrivals is not None:
            self._note(rank, message)
        if message.payload is not None:
            self._keep(rank, message, message.payload)
        if message.epoch != self._epoch:
            # Sent before that rank had heard that numbers are given out anew.
            for slot in message.slots:
                key, requests = self._old_slots[slot]
                self._ask(rank, key, requests[rank])
        else:
            if self._behind:
                self._behind &= ~bit
            asked = self._asked
            for slot in message.slots:
                mask = asked[slot]
                key = self._slots[slot].key
                if not mask:
                    # The quick way counts bits only: where another rank has asked for something else under this name, or has
                    # joined, requests are compared one by one.
                    if key in self._open or self._joined:
                        self._ask(rank, key, self._slots[slot].requests[rank])
                        continue
                    self._since_s[key] = time.monotonic()
                asked[slot] = mask = mask | bit
                if mask == self._all:
                    asked[slot] = 0
                    del self._since_s[key]
                    self._ready_slots.append(slot)
        for request in message.requests:
            self._ask(rank, request.key, request)
        if message.leaving:
            self._left |= bit
            self.end(f"rank {rank} has shut down, at the end of its script or by its own call")

    @property
    def is_left_by_all(self) -> bool:
        """True if every other rank has said that it leaves: nothing more will come."""
        # Bit 0 is the first rank, where this object is: it asks about the others.
        return self._left | 1 == self._all

    def end(self, reason: str) -> None:
        """Let the next response be the last one."""
        if self._end is None:
            self._end = reason

    def respond(self) -> Response | None:
        """The response that tells all ranks what to do next; None while there is nothing to do."""
        slots = tuple(self._ready_slots)
        self._ready_slots.clear()
        results: list[tuple[int, bytes]] = []
        # Before the epoch may change: these numbers are the old one's.
        if self._payloads:
            self._fold(results, 0, [next(iter(self._slots[slot].requests.values())) for slot in slots])
        # Not before every rank has sent a number of this epoch: numbers of the one before would then be under way still.
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
        """The operations that some ranks have waited for this long."""
        now_s = time.monotonic()
        found = []
        for key, since_s in self._since_s.items():
            if now_s - since_s >= longer_than_s:
                slot = self._slot_of.get(key, -1)
                asked = sum(1 << rank for rank in self._open[key]) if key in self._open else 0
                if not asked and slot >= 0:
                    asked = self._asked[slot]
                missing = [rank for rank in range(self._size) if not (asked | self._joined) & (1 << rank)]
                submitted = [rank for rank in range(self._size) if asked & (1 << rank)]
                found.append(Late(key, now_s - since_s, missing, submitted))
        return found

    def _note(self, rank: int, message: Message) -> None:
        assert self.arrivals is not None
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
        """Add up what has come with the messages, where every rank has sent it along. wrong: places of disagreements."""
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
            # Not anew for what was asked for by number before: it has waited since then.
            self._since_s.setdefault(key, time.monotonic())
            self._to_open(key, requests)
        requests[rank] = request
        self._check(key, requests)

    def _to_open(self, key: Key, requests: dict[int, Request]) -> None:
        """Write out what was asked for by number under this name: another rank asks for something else."""
        slot = self._slot_of.get(key, -1)
        if slot >= 0 and self._asked[slot]:
            mask, self._asked[slot] = self._asked[slot], 0
            known = self._slots[slot].requests
            requests.update({rank: known[rank] for rank in range(self._size) if mask & (1 << rank)})

    def _write_out_all(self) -> None:
        for key in [self._slots[slot].key for slot, mask in enumerate(self._asked) if mask]:
            self._to_open(key, self._open.setdefault(key, {}))

    def _join(self, rank: int) -> None:
        self._joined |= 1 << rank
        self._last_joined = rank
        # Those who have joined are counted among written requests alone.
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
        """The number for what was agreed upon, -1 if it gets none: it was seen for the first time, or there is no room.

        Names that are made up anew in each step would fill the cache otherwise.
        """
        slot = self._slot_of.get(key, -1)
        if slot >= 0:
            # The same name with another shape keeps its number, which stands for the new request from now on.
            self._slots[slot] = _Slot(key, requests)
            return slot
        if not self._capacity:
            return -1
        if key not in self._seen:
            self._seen[key] = None
            # Names that are seen once are forgotten in turn, or made-up ones would take memory for ever.
            if len(self._seen) > 4 * self._capacity:
                self._seen.popitem(last=False)
            return -1
        if len(self._slots) >= self._capacity:
            self._full = True
            return -1
        self._slots.append(_Slot(key, requests))
        self._asked.append(0)
        self._slot_of[key] = len(self._slots) - 1
        return len(self._slots) - 1

    def _start_epoch(self) -> None:
        """Give out all numbers anew. Those that are under way are still understood; until then there is no other epoch."""
        self._write_out_all()
        self._old_slots, self._slots, self._slot_of, self._asked = self._slots, [], {}, []
        self._epoch += 1
        # Each rank may have sent numbers of the epoch that ends here before it hears of the new one.
        self._behind, self._full = self._all, False


class ResponseCache:
    """A rank's memory of what the ranks have agreed upon. It knows no transport, like `Coordinator`."""

    def __init__(self) -> None:
        self._epoch = 0
        self._numbers: dict[tuple[str, str], tuple[int, Request]] = {}
        self._agreements: dict[int, Agreement] = {}

    def known(self, fields: Fields) -> Request:
        """The request of these fields; the equal one that was agreed upon before, if there is one. Any thread may call it.

        A step makes hundreds: what is made anew and kept until it is done wakes Python's garbage collector.
        """
        # No lock: one look into the table, which the thread with the turn changes key by key or replaces as a whole.
        found = self._numbers.get((fields[0], fields[1]))
        return found[1] if found is not None and found[1] == fields else Request(*fields)

    def message(self, requests: Sequence[Request], leaving: bool = False, payload: bytes | None = None) -> Message:
        """The message that asks for these: by number where exactly this was agreed upon before."""
        slots, others = [], []
        for request in requests:
            known = self._numbers.get(request.key)
            if known is not None and known[1] == request:
                slots.append(known[0])
            else:
                others.append(request)
        return Message(self._epoch, tuple(slots), tuple(others), leaving, payload)

    def agreed(self, response: Response, asked: Callable[[Key], Request | None]) -> list[Agreement]:
        """The operations to do, in this order. asked: gives this rank's request for a key; None if it has joined and has none."""
        known = [self._agreements[slot] for slot in response.slots]
        if response.epoch != self._epoch:
            # All numbers are void from now on, those of this response too, which were looked up before.
            self._numbers, self._agreements, self._epoch = {}, {}, response.epoch
        for agreement in response.agreements:
            request = asked(agreement.request.key) if agreement.slot >= 0 else None
            if request is not None:
                self._agreements[agreement.slot] = agreement
                self._numbers[request.key] = (agreement.slot, request)
        return [*known, *response.agreements]


def inline_payload(task: CollectiveTask) -> bytes | None:
    """The bytes that this rank adds to the sum, scaled; None for an operation that doesn't travel with the negotiation."""
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
    """The ranks' payloads, reduced in the order of the ranks."""
    import numpy

    dtype = request.dtypes[0]
    kind, op = numpy.dtype(numbers.sum_type(dtype)), numbers.operation(request.op, dtype)
    arrays = [numpy.frombuffer(data, kind) for data in payloads]
    with numpy.errstate(all="ignore"):
        whole = arrays[0]
        if len(arrays) > 1:
            whole = numbers.joined(numbers.ufunc(op, kind), arrays, numpy.empty_like(whole))
    return bytes(whole)


def inline_result(task: CollectiveTask, data: bytes, size: int) -> Any:
    """The task's result, made of what came out of `size` ranks' payloads."""
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
