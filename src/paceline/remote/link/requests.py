"""The requests of one side of a link that have not been answered yet."""

from __future__ import annotations

import itertools
import threading
from typing import Any


class Pending:
    """One request."""

    def __init__(self, number: int, in_order: bool) -> None:
        self.number = number
        #: The answer counts once all files that came before it are in their place.
        self.in_order = in_order
        self.answer: tuple[dict[str, Any], bytes] | None = None
        self._done = threading.Event()

    def settle(self, answer: tuple[dict[str, Any], bytes] | None) -> None:
        self.answer = answer
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        return self._done.wait(timeout_s)


class Requests:
    """All of a link. Thread-safe."""

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._over = False

    def new(self, *, in_order: bool = False) -> Pending:
        with self._lock:
            pending = Pending(next(self._count), in_order)
            # Under the lock of `end`: a request is ended by it, or finds the end here.
            if self._over:
                pending.settle(None)
            else:
                self._pending[pending.number] = pending
            return pending

    def find(self, number: int) -> Pending | None:
        with self._lock:
            return self._pending.get(number)

    def settle(self, number: int, answer: tuple[dict[str, Any], bytes]) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.settle(answer)

    def forget(self, pending: Pending) -> None:
        with self._lock:
            self._pending.pop(pending.number, None)

    def end(self) -> None:
        """No answer will come any more."""
        with self._lock:
            self._over = True
            left = list(self._pending.values())
            self._pending.clear()
        # Without the lock: those who wait are woken, and may ask for something else at once.
        for pending in left:
            pending.settle(None)
