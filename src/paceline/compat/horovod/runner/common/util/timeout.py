"""A time limit."""

from __future__ import annotations

import time


class TimeoutException(Exception):  # noqa: N818
    """The time is up."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A time limit in seconds from its creation. `message` is the error's text, with `{activity}` in it."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout, self._message = timeout, message
        self._end_s = time.monotonic() + timeout

    def remaining(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self._end_s - time.monotonic())

    def timed_out(self) -> bool:
        """Return whether the time is up."""
        return time.monotonic() > self._end_s

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException if the time is up."""
        if self.timed_out():
            told = self._message.format(activity=activity).rstrip()
            raise TimeoutException(f"{told.rstrip('.')}. Timeout after {self._timeout} seconds.")
