"""The end of children: each is asked for once, and again where nobody could be told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from paceline.errors import EngineError, PacelineError
from paceline.runs import read, states, store, tags_and_properties
from paceline.runs.driver_log import say
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import utc_now

#: Tag of a child: why it was stopped.
STOPPED = "stopped"
#: After the engine of a child that is to end has not answered.
_AGAIN_S = 5.0
#: Between two looks at children that are to end.
_PAUSE_S = 0.5

#: After an engine has not taken a child: the first pause. Each further one is twice as long, up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
#: So long an engine may take nothing while nothing of the run's runs.
_PATIENCE_S = 3600.0


class Canceling:
    """Asks for the end of children: of each once, and again where nobody could be told. by: who asks, such as "sweep ID"."""

    def __init__(self, by: str) -> None:
        self._by = by
        self._asked: set[str] = set()
        self._untold: dict[str, tuple[RunFolder, str, str]] = {}
        self._again_at = 0.0

    def ask(self, child: RunFolder, reason: str, tag: str = STOPPED) -> bool:
        """Whether it is asked for only now. tag: what the child's notes call the reason."""
        if child.run_id in self._asked:
            return False
        self._asked.add(child.run_id)
        # Who canceled the child by hand keeps that as its reason.
        if not child.cancel_request.exists():
            self._tell(child, reason, tag)
        return True

    def is_asked(self, child: RunFolder) -> bool:
        return child.run_id in self._asked

    def again(self) -> None:
        """Ask once more for what nobody could be told; to be called now and then."""
        if self._untold and time.monotonic() >= self._again_at:
            for child, reason, tag in list(self._untold.values()):
                self._tell(child, reason, tag)

    def _tell(self, child: RunFolder, reason: str, tag: str) -> None:
        self._untold.pop(child.run_id, None)
        try:
            # The tag goes first, so that whoever sees the child end can read why.
            tags_and_properties.set_tags(child.notes, {tag: reason})
            read.request_cancel(child, by=self._by, reason=reason)
        except (PacelineError, OSError):
            if child.record.exists():
                self._untold[child.run_id] = child, reason, tag
                self._again_at = time.monotonic() + _AGAIN_S


def give_up(folder: RunFolder, error: Exception, cause: str, living: Callable[[], Iterable[RunFolder]]) -> None:
    """End a run whose controller can't go on: its children are ended, and it has Failed. For the holder of its lock.

    cause: of the failure where the error is not one of our own slips. living: the children that have not ended, as they are now.
    """
    kind = store.stored(folder).kind
    is_ours = not isinstance(error, PacelineError)
    message = f"{'The controller has failed' if is_ours else f'The {kind} can not go on'}: {error}"
    say(message)
    canceling = Canceling(f"{kind} {folder.run_id}")
    # By the records alone: what the controller knew of the children may be what has failed.
    while left := list(living()):
        for child in left:
            canceling.ask(child, message)
        canceling.again()
        time.sleep(_PAUSE_S)
    report = FailureReport(cause="internal" if is_ours else cause, message=message)
    store.change(
        folder, store.stored(folder), states.FAILED, failure=report, exit_code=1, ended_utc=utc_now(), waiting_for=None
    )


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
