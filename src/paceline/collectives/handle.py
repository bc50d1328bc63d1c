"""The handle that a submitted operation gives back at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from paceline.collectives import recorder
from paceline.system import step_clock

_log = logging.getLogger(__name__)
#: Guards the callbacks of all handles: it is held for moments only.
_callbacks_lock = threading.Lock()


class Handle:
    """An operation in flight, and then its result. A step makes hundreds, so a lock is all that it holds."""

    __slots__ = ("_await", "_callbacks", "_done", "_error", "_key", "_lock", "_place", "_result")

    def __init__(self, key: tuple[str, str], wait: Callable[[Handle, float | None], None] | None = None) -> None:
        """key: the operation's kind and name. wait: is called by whoever waits, and may get on with the work; returns when
        it is done, or time is up.
        """
        self._key = key
        self._await = wait
        # Held until the operation is done. Whoever waits takes it and gives it back, so all who wait get through; an Event
        # would be three objects and more in its place.
        self._lock = threading.Lock()
        self._lock.acquire()
        self._done = False
        #: Where the board has it (`paceline.collectives.recorder`).
        self._place = -1
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Handle], object]] | None = None

    @property
    def name(self) -> str:
        """The operation's kind and name, for messages."""
        return ".".join(self._key)

    def done(self) -> bool:
        """True if `wait` would return, or raise, at once."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> Any:
        """The result of the operation, as soon as it is there. May be called again, and by several threads.

        Raises:
            MismatchError: the ranks asked for different things.
            ShutDownError: a rank has died or shut down.
            TimeoutError: `timeout_s` has passed; the operation goes on.
        """
        if not self._done:
            clock = step_clock.clock()
            since = 0.0 if clock is None else clock.begin(step_clock.WAIT)
            try:
                if self._await is not None:
                    self._await(self, timeout_s)
                else:
                    self.block(timeout_s)
            finally:
                if clock is not None:
                    clock.end(step_clock.WAIT, since)
            if not self._done:
                raise TimeoutError(f"{self.name!r} has not been completed within {timeout_s:g} s.")
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error.__cause__
        return self._result

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        """Call `callback(self)` when the operation is done, in the thread that did it; at once if it is done already.

        It may submit operations, and must not wait for one: the thread that calls it is the one that would do it.
        """
        with _callbacks_lock:
            if not self._done:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        callback(self)

    def block(self, timeout_s: float | None) -> None:
        """Sleep until it is done, or time is up."""
        if self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._lock.release()

    def _finish(self, result: Any = None, error: BaseException | None = None) -> bool:
        """Complete the handle; True if this call did so, for the first one wins."""
        with _callbacks_lock:
            if self._done:
                return False
            # In this order: `wait` looks at `_done` without a lock, and then takes the result.
            self._result, self._error = result, error
            self._done = True
            callbacks, self._callbacks = self._callbacks, None
        self._lock.release()
        if self._place >= 0:
            recorder.end(self._place)
        # Without `_callbacks_lock`: a callback may finish, or add to, another handle.
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of %r has failed", self.name)
        return True
