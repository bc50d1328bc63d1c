"""A rank's side of the negotiation: which names have numbers, and what was agreed upon under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.collectives.coordinator import Key, Message, Response
from paceline.collectives.request import Agreement, Fields, Request


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
