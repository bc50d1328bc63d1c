"""The writing side of a link, for the supervisor and the agent alike: what is urgent goes first, and never waits long.

Also says every few seconds that it is there: any byte counts as a sign of life, so a ping goes only when all is quiet.
"""

from __future__ import annotations

import collections
import os
import threading
from typing import Any

from paceline.remote.wire import frame

#: Classes of frames, the first goes first. LIVE: lines of logs and metrics, ends of commands, in their order. BULK:
#: files, in theirs.
URGENT, LIVE, BULK = range(3)
#: What may lie ready of files: little, for it is what others wait behind.
_ROOM_BYTES = 1 << 20


class SendQueue(threading.Thread):
    """Writes frames to a file descriptor, in a thread of its own; what comes after the other side has gone is dropped."""

    def __init__(self, fd: int, ping_s: float) -> None:
        super().__init__(name="paceline-link-out", daemon=True)
        self._fd, self._ping_s = fd, ping_s
        self._queues: tuple[collections.deque[bytes], ...] = tuple(collections.deque() for _ in range(3))
        self._sizes = [0, 0, 0]
        # Guards all of these; told whenever something was put, has gone out, or it is over. Who waits for room waits for
        # this thread alone, which holds it while it takes the next frame, never while it writes.
        self._changed = threading.Condition()
        self._closing = self._closed = False

    def put(self, header: dict[str, Any], data: bytes = b"", *, kind: int = URGENT, wait: bool = False) -> None:
        """Have a frame written. wait: first until there is room for more of its kind.

        Raises:
            BrokenPipeError: with `wait`, when the other side is gone.
        """
        text = frame(header, data)
        with self._changed:
            # Only senders of files wait for room: they read as fast as the link takes it, and hold little in memory. Whoever
            # asks, answers or reports an end must never stand still here.
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
        """True if a frame of this kind would be taken at once."""
        # Not under the lock: by the time the answer is used it is old either way, and `put` waits.
        return self._sizes[kind] < _ROOM_BYTES

    def finish(self) -> None:
        """Write what is queued, then end; returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def drop(self) -> None:
        """End without writing what is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        while (text := self._next()) is not None:
            # Without the lock: the other side may take nothing for seconds, and others go on queueing meanwhile. A frame is
            # written whole, so what is urgent waits for one frame at most.
            try:
                view = memoryview(text)
                while view:
                    view = view[os.write(self._fd, view) :]
            except OSError:
                self.drop()  # by which those who wait for room get to know

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
