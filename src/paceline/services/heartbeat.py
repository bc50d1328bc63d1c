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
    """A pipe to one server. fd: the end that the server writes into, to be handed on to it."""

    def __init__(self) -> None:
        self._read_fd, self.fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._heard_s: float | None = None

    def handed_on(self) -> None:
        """The server has its end now."""
        self._close(self.fd)
        self.fd = -1

    def is_silent(self) -> bool:
        """True where the server has moved before, and not for `SILENT_S`."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._read_fd, 4096):
                self._heard_s = time.monotonic()
        return self._heard_s is not None and time.monotonic() - self._heard_s > SILENT_S

    def close(self) -> None:
        for fd in (self._read_fd, self.fd):
            self._close(fd)
        self._read_fd = self.fd = -1

    @staticmethod
    def _close(fd: int) -> None:
        if fd >= 0:
            os.close(fd)
