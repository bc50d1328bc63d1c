"""Whether a server still moves: its loop writes into a pipe each second (`paceline.serving.front.beat`).

Not by a request: a server that has all the connections it takes, or a full queue, is busy and not hung.
"""

from __future__ import annotations

import contextlib
import os
import time

#: Silence after which a server is taken to hang. A guess: far above what a busy machine makes a process wait.
SILENT_S = 60.0


class Heartbeat:
    """A pipe to one server. fd: the number of the end that the server writes into, there too once it is handed on."""

    def __init__(self) -> None:
        self._read_fd, self.fd = os.pipe()
        self._open = [self._read_fd, self.fd]
        os.set_blocking(self._read_fd, False)
        self._heard_s: float | None = None

    def handed_on(self) -> None:
        """The server has its end now."""
        self._open.remove(self.fd)
        os.close(self.fd)

    def is_silent(self) -> bool:
        """True where the server has moved before, and not for `SILENT_S`."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._read_fd, 4096):
                self._heard_s = time.monotonic()
        return self._heard_s is not None and time.monotonic() - self._heard_s > SILENT_S

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())
