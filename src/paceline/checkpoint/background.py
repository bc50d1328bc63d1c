"""Threads that write checkpoints while training continues."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable

_log = logging.getLogger(__name__)
#: Seconds without progress after which a write counts as hung: SAVE_S in save(); END_S in wait(), latest() and at exit.
SAVE_S, END_S = 30.0, 600.0


class BackgroundWrite(threading.Thread):
    """A daemon thread that writes a checkpoint.

    At exit the process waits for the thread, but not if the disk hangs: a daemon thread does not prevent the exit.

    Attributes:
        error: The failure of the write; None while the thread runs and after a success.
    """

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        """Start a thread that writes a checkpoint by `work(moves)`. `work` reports progress by `moves()`."""
        super().__init__(name="paceline-checkpoint", daemon=True)
        self._work = work
        self.error: Exception | None = None
        self._moved_at = time.monotonic()
        self._is_given_up = False
        _running.add(self)
        self.start()

    def run(self) -> None:
        try:
            self._work(self._moves)
        except Exception as error:
            self.error = error
            # Log the error now, because the script may never call wait().
            _log.error("%s Training continues.", error)

    def _moves(self) -> None:
        self._moved_at = time.monotonic()

    def settle(self, patience_s: float = END_S) -> bool:
        """Wait until the checkpoint is written. Return False after `patience_s` without progress."""
        while self.is_alive():
            left_s = self._moved_at + patience_s - time.monotonic()
            if left_s <= 0:
                if not self._is_given_up:
                    _log.warning("the disk of a checkpoint has taken no byte for %.0f s: it hangs.", patience_s)
                self._is_given_up = True
                return False
            self.join(left_s)
        return True


_running: weakref.WeakSet[BackgroundWrite] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    for writing in list(_running):
        writing.settle()
