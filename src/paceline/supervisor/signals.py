"""The supervisor's signals: a sleep that a child's end, news of other nodes or a request to stop cuts short."""

from __future__ import annotations

import contextlib
import os
import select
import signal


class Wake:
    """Catches SIGCHLD, SIGTERM, SIGINT, SIGHUP and SIGUSR2 for its process.

    `stopped_by`: the signal that asked for the end; SIGUSR2 is an engine's warning that the job's time is nearly up.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        # The "self-pipe trick": a handler may run at any instruction and does next to nothing, so it can't hold a lock that the
        # interrupted code wants. That it ran is told by a byte in a pipe, for which `sleep` waits: a signal that comes just
        # before the sleep begins is not missed, as it would be by a flag that is looked at first.
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        # The interpreter itself writes the byte, in its C handler. A full pipe is no loss: one byte is enough to wake up.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # Handlers, not masks: a blocked signal would stay blocked in every worker. And not SIG_IGN, which exec keeps as well.
        # SIGCHLD has a handler that does nothing because without one Python's C handler, which writes the byte, is not set.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, self._stop)

    def heed(self, nodes: object) -> None:
        """Wake up when these nodes have news, too: no signal tells of what runs elsewhere."""
        if hasattr(nodes, "on_news"):
            nodes.on_news = self.poke

    def poke(self) -> None:
        """Cut a sleep short. May be called from any thread, and needs no lock: a write of one byte to a pipe is atomic."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until one of the signals or some news comes."""
        select.select([self._read], [], [], max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def _stop(self, number: int, frame: object) -> None:
        # The first one counts: an engine that warns by SIGUSR2 sends SIGTERM some time after.
        if self.stopped_by is None:
            self.stopped_by = number
