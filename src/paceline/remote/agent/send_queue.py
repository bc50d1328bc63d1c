"""The writing side of a link, for supervisor and agent, which sends urgent frames first.

When there is nothing to send, each side sends a ping every few seconds, which proves that it lives.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable

from paceline.remote.wire import PING, Header, frame

#: Priorities, in which frames keep their order. LIVE: lines of logs and metrics, exits of commands. BULK: files.
URGENT, LIVE, BULK = range(3)
#: Bytes of a priority that may be queued before writers of files have to wait.
_ROOM_BYTES = 1 << 20


class Outbox:
    """Frames that wait to be written, urgent ones first. Thread-safe.

    on_frame: A callback for each queued frame, and for the end.
    """

    def __init__(self, on_frame: Callable[[], None] = lambda: None) -> None:
        self._on_frame = on_frame
        self._queues: tuple[collections.deque[bytes], ...] = tuple(collections.deque() for _ in range(3))
        self._sizes = [0, 0, 0]
        # Guards the queues, sizes and flags; notified after each change. Not held during a write.
        self._changed = threading.Condition()
        self._closing = self._closed = False

    def put(self, header: Header, data: bytes = b"", *, kind: int = URGENT, wait: bool = False) -> None:
        """Queue a frame. With `wait`, first wait for room among the frames of its priority.

        Raises:
            BrokenPipeError: The link is closed. Without `wait`, the frame is dropped instead.
        """
        text = frame(header, data)
        with self._changed:
            # Only senders of files may wait: requests, answers and ends of commands must never block.
            while wait and self._sizes[kind] >= _ROOM_BYTES and not self._closed:
                self._changed.wait()
            if self._closed or self._closing:
                if wait:
                    raise BrokenPipeError("the link is closed")
                return
            self._queues[kind].append(text)
            self._sizes[kind] += len(text)
            self._changed.notify_all()
        self._on_frame()

    def has_room(self, kind: int) -> bool:
        """Return whether `put` would queue a frame of this priority without waiting."""
        # No lock: the answer may be outdated a moment later anyway, and `put` waits for room.
        return self._sizes[kind] < _ROOM_BYTES

    def finish(self) -> None:
        """Write the queued frames, then end. Return at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def drop(self) -> None:
        """End without writing the queued frames."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self) -> bytes | None:
        """Return the next frame to write, or None if no frame waits."""
        with self._changed:
            if self._closed:
                return None
            for kind, queue in enumerate(self._queues):
                if queue:
                    text = queue.popleft()
                    self._sizes[kind] -= len(text)
                    self._changed.notify_all()
                    return text
            self._closed = self._closing
            return None


class SendQueue(Outbox, threading.Thread):
    """A thread that writes frames to a file descriptor. It drops frames once the other side is gone."""

    def __init__(self, fd: int, ping_s: float) -> None:
        Outbox.__init__(self)
        threading.Thread.__init__(self, name="paceline-link-out", daemon=True)
        self._fd, self._ping_s = fd, ping_s

    def run(self) -> None:
        while (text := self._next()) is not None:
            # Write without the lock, since writing may block for seconds while other threads queue frames.
            try:
                view = memoryview(text)
                while view:
                    view = view[os.write(self._fd, view) :]
            except OSError:
                self.drop()  # wakes threads that wait for room

    def _next(self) -> bytes | None:
        """Return the next frame, a ping after a pause, or None at the end."""
        with self._changed:
            while (text := self.take()) is None and not self._closed:
                if not self._changed.wait(self._ping_s):
                    return PING
            return text
