"""The handle of a submitted collective operation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from paceline.collectives import recorder
from paceline.system import step_clock

_log = logging.getLogger(__name__)
#: Protects the callbacks of all handles. Threads hold this lock only for a moment.
_callbacks_lock = threading.Lock()


class Handle:
    """A submitted collective operation: its state, then its result."""

    __slots__ = ("_await", "_callbacks", "_done", "_error", "_key", "_lock", "_place", "_result")

    def __init__(self, key: tuple[str, str], wait: Callable[[Handle, float | None], None] | None = None) -> None:
        """Create the handle of operation `key` (kind, name). `Handle.wait` calls `wait(self, timeout_s)`."""
        self._key = key
        self._await = wait
        # This lock is held until the operation is done. Each waiting thread acquires and releases it, which wakes the next
        # thread. A threading.Event would need three or more objects for each handle.
        self._lock = threading.Lock()
        self._lock.acquire()
        self._done = False
        #: Number of the entry by which status reports show this operation while it runs, or -1.
        self._place = -1
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Handle], object]] | None = None

    @property
    def name(self) -> str:
        """The operation's kind and name, for messages."""
        return ".".join(self._key)

    def done(self) -> bool:
        """Return whether the operation has finished or failed."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the operation and return its result.

        Several threads may call `wait`, and more than once. `timeout_s=None` waits without a limit.

        Raises:
            MismatchError: The ranks requested different operations.
            ShutDownError: A rank has died or shut down.
            TimeoutError: `timeout_s` has passed; the operation continues.
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
        """Call `callback(self)` once the operation is done.

        The thread that completes the operation makes the call, or this thread if the operation is done already. The
        callback may submit operations, but must not wait for them, because its thread may have to perform them.
        """
        with _callbacks_lock:
            if not self._done:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        callback(self)

    def block(self, timeout_s: float | None) -> None:
        """Sleep until the operation is done or `timeout_s` has passed."""
        if self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._lock.release()

    def _finish(self, result: object = None, error: BaseException | None = None) -> bool:
        with _callbacks_lock:
            if self._done:
                return False
            # Set the result before `_done`: `wait` takes the result without a lock as soon as `_done` is True.
            self._result, self._error = result, error
            self._done = True
            callbacks, self._callbacks = self._callbacks, None
        self._lock.release()
        if self._place >= 0:
            recorder.end(self._place)
        # Release `_callbacks_lock` first, because a callback may finish another handle, or add a callback to it.
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of %r has failed", self.name)
        return True
