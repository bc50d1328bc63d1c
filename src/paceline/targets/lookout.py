"""Asks an engine now and then, in a thread of its own, how many more nodes a run could have; the last answer at any time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from paceline.errors import EngineError, TargetError


class Lookout:
    """What `look` returns, a number, as it was when asked last. pause_s: from one look's end to the next.

    A look that fails, for the engine does not answer, changes nothing.
    """

    def __init__(self, look: Callable[[], int], pause_s: float) -> None:
        self._look, self._pause_s = look, pause_s
        self._thread: threading.Thread | None = None
        self._next = 0.0
        # Written by the thread alone, and read here: one number.
        self._found = 0

    def found(self) -> int:
        """The last answer, 0 before the first. Begins another look where it is time for one; never waits."""
        is_looking = self._thread is not None and self._thread.is_alive()
        if not is_looking and time.monotonic() >= self._next:
            # A daemon: an engine that never answers must not keep the supervisor alive.
            self._thread = threading.Thread(target=self._run, name="paceline-lookout", daemon=True)
            self._thread.start()
        return self._found

    def _run(self) -> None:
        with contextlib.suppress(TargetError, EngineError, OSError):
            self._found = self._look()
        self._next = time.monotonic() + self._pause_s
