"""A queue of frames to write to a link, urgent frames first, and the agent's thread that writes them.

While no frame is queued, both sides send a ping every few seconds, which proves that their process is alive.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable

from paceline.remote.wire import PING, Header, frame

#: Priorities of frames; frames of equal priority keep their order. LIVE: logs, metrics and exits of commands. BULK: files.
URGENT, LIVE, BULK = range(3)
#: If this many bytes of a priority are queued, writers of files have to wait.
_ROOM_BYTES = 1 << 20


class Outbox:
    """A thread-safe queue of messages (frames) to send.

    on_frame: A callback that is called after each queued frame.
    """

    def __init__(self, on_frame: Callable[[], None] = lambda: None) -> None:
        self._on_frame = on_frame
        self._queues: tuple[collections.deque[bytes], ...] = tuple(collections.deque() for _ in range(3))
        self._sizes = [0, 0, 0]
        # This condition guards the queues, sizes and flags. Each change notifies it. A thread releases it before it writes.
        self._changed = threading.Condition()
        self._closing = self._closed = False

    def put(self, header: Header, data: bytes = b"", *, kind: int = URGENT, wait: bool = False) -> None:
        """Queue a frame with the priority `kind`.

        wait: First wait until the queued frames of this priority take less than 1 MiB.

        Raises:
            BrokenPipeError: The link is closed, and `wait` is true. Without `wait`, the frame is dropped instead.
        """
        text = frame(header, data)
        with self._changed:
            # Let only senders of files wait, because requests, answers and ends of commands must never block.
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
        """Return whether `put` would queue a frame of the priority `kind` without waiting."""
        # Read the size without the lock. The answer may soon be outdated anyway, and `put` itself waits for room.
        return self._sizes[kind] < _ROOM_BYTES

    def finish(self) -> None:
        """Accept no further frames. Do not wait until the queued frames are written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def drop(self) -> None:
        """Drop the queued frames, and accept no further frames."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self) -> bytes | None:
        """Return the next frame to write, or None if no frame is queued."""
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
    """A thread that writes queued frames to a file descriptor until the receiver closes it."""

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
                self.drop()  # `drop` wakes the threads that wait for room

    def _next(self) -> bytes | None:
        with self._changed:
            while (text := self.take()) is None and not self._closed:
                if not self._changed.wait(self._ping_s):
                    return PING
            return text
