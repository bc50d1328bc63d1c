"""Read ahead of an iterable, in a thread that ends when no more is wanted."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

#: The thread and the loop notice `close` within this time: neither waits for the queue any longer.
_TICK_S = 0.1
#: How long the end waits for a batch that is being made.
_CLOSE_S = 5.0

#: A reader stays in it for as long as its thread runs, for the thread refers to it.
_living: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


class Prefetcher:
    """The items of an iterable, up to `size` of them read in advance. To be iterated once."""

    def __init__(self, items: Iterable[Any], size: int) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(size)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(items,), name="paceline-read-ahead", daemon=True)
        _living.add(self)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while not self._closed.is_set():
            try:
                kind, value = self._queue.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    def close(self) -> None:
        """End the thread. It ends by itself once the batch that it is making is there."""
        self._closed.set()
        # An iterable may close the reader itself, in the reader's thread, which can't wait for its own end.
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _read(self, items: Iterable[Any]) -> None:
        try:
            iterator = iter(items)
            try:
                for item in iterator:
                    if not self._put("item", item):
                        break
            finally:
                # A generator's own clean-up runs here, in the thread that ran it.
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
        # Whatever it is, the loop has to hear of it, or it would wait for ever.
        except BaseException as error:
            self._put("error", error)
        else:
            self._put("end", None)

    def _put(self, kind: str, value: Any) -> bool:
        """Put it into the queue; False once the reader is closed."""
        while not self._closed.is_set():
            try:
                self._queue.put((kind, value), timeout=_TICK_S)
            except queue.Full:
                continue
            return True
        return False


@atexit.register
def _close_all() -> None:
    """A thread that runs into the interpreter's end may crash it, in the middle of numpy or torch."""
    for reader in list(_living):
        reader.close()
