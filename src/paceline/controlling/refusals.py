"""An engine that does not take children: it is asked again ever less often, and not without an end."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import EngineError

#: After an engine has not taken a child: the first pause. Each further one is twice as long, up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
#: So long an engine may take nothing while nothing of the run's runs.
_PATIENCE_S = 3600.0


class Refusals:
    """Those of one engine. target: the name of its compute target. clock: seconds, which only grow."""

    def __init__(self, target: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._target = target
        self._clock = clock
        self._pause = 0.0
        self._not_before = clock()
        self._since: float | None = None

    @property
    def may_ask(self) -> bool:
        """Whether the engine may be asked now."""
        return self._clock() >= self._not_before

    @property
    def is_waiting(self) -> bool:
        """Whether something is to be handed over that the engine does not take yet."""
        return self._since is not None

    def taken(self) -> None:
        """It has taken one."""
        self._pause, self._since = 0.0, None

    def refused(self, what: str, error: EngineError, *, others_run: bool, advice: str = "") -> float:
        """It has not; the seconds until it may be asked again. what: was to be handed over, such as "trial".

        Raises:
            EngineError: it has taken nothing for an hour. advice: stands at the end of its message.
        """
        now = self._clock()
        # While others run, the end of one may make the room that is missing.
        if self._since is None or others_run:
            self._since = now
        if (waited := now - self._since) >= _PATIENCE_S:
            raise EngineError(
                f"compute target {self._target!r} has taken no {what} for {waited / 60:.0f} minutes: {error}{advice}"
            ) from error
        self._pause = min(2 * self._pause or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._not_before = now + self._pause
        return self._pause
