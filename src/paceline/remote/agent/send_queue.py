"""A queue of frames to write to a link, which writes urgent frames first. Supervisor and agent use it.

While no frame is queued, the queue sends a ping every few seconds, which proves that this process is alive.
"""

from __future__ import annotations

import collections
import os
import threading

from paceline.remote.wire import Header, frame

#: Priorities of frames; frames of equal priority keep their order. LIVE: logs, metrics and exits of commands. BULK: files.
URGENT, LIVE, BULK = range(3)
#: If this many bytes of a priority are queued, writers of files have to wait.
_ROOM_BYTES = 1 << 20


class SendQueue(threading.Thread):
    """A thread that writes queued frames to a file descriptor until the receiver closes it."""

    def __init__(self, fd: int, ping_s: float) -> None:
        super().__init__(name="paceline-link-out", daemon=True)
        self._fd, self._ping_s = fd, ping_s
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

    def has_room(self, kind: int) -> bool:
        """Return whether `put` would queue a frame of the priority `kind` without waiting."""
        # Read the size without the lock. The answer may soon be outdated anyway, and `put` itself waits for room.
        return self._sizes[kind] < _ROOM_BYTES

    def finish(self) -> None:
        """Let the thread end after writing the queued frames. Do not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def drop(self) -> None:
        """Let the thread end without writing the queued frames."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

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
            while not self._closed:
                for kind, queue in enumerate(self._queues):
                    if queue:
                        text = queue.popleft()
                        self._sizes[kind] -= len(text)
                        self._changed.notify_all()
                        return text
                if self._closing:
                    self._closed = True
                elif not self._changed.wait(self._ping_s):
                    return frame({"op": "ping"})
            return None
