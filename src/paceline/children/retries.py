"""Repeat requests to engines until they succeed: canceling a child, and submitting one."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import EngineError, PacelineError
from paceline.runs import read, tags_and_properties
from paceline.runs.folder import RunFolder

#: Name of the tag that says why a child run was stopped.
STOPPED = "stopped"
#: Seconds after which a cancel request of a child run is sent again if it has failed.
_AGAIN_S = 5.0
#: Pause in seconds after an engine has refused to start a child: at first, and at most. Each refusal doubles the pause.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
#: Raise EngineError if no child is live and the engine has refused to start every child for this many seconds.
_PATIENCE_S = 3600.0


class Canceling:
    """A sender of cancel requests to child runs. `again` repeats failed requests.

    `by` names the run or user that cancels the children, such as "sweep ID". `check` is called before each request.
    """

    def __init__(self, by: str, check: Callable[[], object]) -> None:
        self._by, self._check = by, check
        self._requested: set[str] = set()
        self._failed: dict[str, tuple[RunFolder, str, str]] = {}
        self._again_at = 0.0

    def ask(self, child: RunFolder, reason: str, tag: str = STOPPED) -> bool:
        """Cancel a child run. Return False if an earlier call has canceled it.

        Store `reason` in the child run's tag called `tag`.
        """
        if child.run_id in self._requested:
            return False
        self._requested.add(child.run_id)
        # If a user has already canceled the child, keep the user's request as the reason.
        if not child.cancel_request.exists():
            self._request(child, reason, tag)
        return True

    def is_asked(self, child: RunFolder) -> bool:
        """Return whether this object has canceled the child run."""
        return child.run_id in self._requested

    def again(self) -> None:
        """Repeat the cancel requests that failed. The controller calls this at each tick."""
        if self._failed and time.monotonic() >= self._again_at:
            for child, reason, tag in list(self._failed.values()):
                self._request(child, reason, tag)

    def _request(self, child: RunFolder, reason: str, tag: str) -> None:
        self._check()
        self._failed.pop(child.run_id, None)
        try:
            # Set the tag before the cancel request, so that the reason is there when readers see the child's end.
            tags_and_properties.set_tags(child.notes, {tag: reason})
            read.request_cancel(child, by=self._by, reason=reason)
        except (PacelineError, OSError):
            if child.state.exists():
                self._failed[child.run_id] = child, reason, tag
                self._again_at = time.monotonic() + _AGAIN_S


class Refusals:
    """The backoff after a scheduler, such as Slurm, has refused child runs.

    `target` is the name of the compute target. `clock` returns monotonic seconds.
    """

    def __init__(self, target: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.target = target
        self._clock = clock
        self._pause = 0.0
        self._not_before = clock()
        self._since: float | None = None

    @property
    def may_ask(self) -> bool:
        """Whether the backoff is over, so that another child run may be submitted."""
        return self._clock() >= self._not_before

    @property
    def is_waiting(self) -> bool:
        """Whether the scheduler refused the latest child run, so the next must wait."""
        return self._since is not None

    def taken(self) -> None:
        """Reset the backoff: the scheduler has accepted a child run."""
        self._pause, self._since = 0.0, None

    def refused(self, what: str, error: EngineError, *, others_run: bool, advice: str = "") -> float:
        """Extend the backoff after the scheduler refused a child run. Return its seconds.

        `what` is the kind of the child run, such as "trial". `others_run` says that other child runs are live. Their end may free
        resources, so the hour before the error begins only later. `advice` ends the error's message.

        Raises:
            EngineError: For an hour, the scheduler has accepted no child run, and no other child run is live.
        """
        now = self._clock()
        if self._since is None or others_run:
            self._since = now
        if (waited := now - self._since) >= _PATIENCE_S:
            raise EngineError(
                f"compute target {self.target!r} has taken no {what} for {waited / 60:.0f} minutes: {error}{advice}"
            ) from error
        self._pause = min(2 * self._pause or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._not_before = now + self._pause
        return self._pause
