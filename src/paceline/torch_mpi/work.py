"""Handles of operations in flight, as torch.distributed returns them. Importing this module loads torch."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from paceline.collectives.errors import CollectivesError
from paceline.system import step_clock

_Work: Any = Work

#: Seconds that the first sleep between two polls takes; LONGEST_SLEEP_S: the longest sleep. Both values are guesses.
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-3


class MpiWork(_Work):  # type: ignore[misc]
    """The handle of an operation in flight, with the methods of torch's `Work`."""

    def __init__(self, future: concurrent.futures.Future[object], text: str) -> None:
        super().__init__()
        self._future = future
        self._text = text
        self._torch_future: torch.futures.Future[object] | None = None

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        return self._future.exception() if self._future.done() else None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operation, and return True. Timeout 0: no limit."""
        timeout_s = timeout.total_seconds()
        step_clock.timed(self._wait, step_clock.WAIT)(timeout_s if timeout_s > 0 else None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        # A CPU tensor has no stream that could wait, so block this thread until the result exists.
        self.wait()

    def result(self) -> object:
        return self._future.result()

    def source_rank(self) -> int:
        raise CollectivesError(f"{self._text} has no source rank; only a receive has a source.")

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[object]:
        """Return torch's future of the outputs, always the same object."""
        if self._torch_future is None:
            settled: torch.futures.Future[concurrent.futures.Future[object]] = torch.futures.Future()
            # Return the future of `then`: C++ code such as DDP's reducer sees an error only if a future's callback has raised it.
            self._torch_future = settled.then(_value)
            self._future.add_done_callback(settled.set_result)
        return self._torch_future

    def _wait(self, timeout_s: float | None) -> None:
        try:
            self._future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            # If the future is done, the operation itself has raised this TimeoutError. The wait has not timed out.
            if self._future.done():
                raise
            raise CollectivesError(
                f"{self._text} is not done after {timeout_s:g} s. It goes on: wait again, or look why a rank is late."
            ) from error


class DoneWork(MpiWork):
    """The handle of a collective that has finished before the call returned."""

    def __init__(self, outputs: object, text: str) -> None:
        # Don't call `MpiWork.__init__`, which needs a future.
        Work.__init__(self)
        self._outputs = outputs
        self._text = text
        self._torch_future = None

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def result(self) -> object:
        return self._outputs

    def get_future(self) -> torch.futures.Future[object]:
        if self._torch_future is None:
            self._torch_future = torch.futures.Future()
            self._torch_future.set_result(self._outputs)
        return self._torch_future


def _value(settled: torch.futures.Future[concurrent.futures.Future[object]]) -> object:
    return settled.value().result()


def wait_until(look: Callable[[], bool], limit_s: float, late: str, *, looks: int) -> None:
    """Poll `look` until it returns True. Raise CollectivesError after `limit_s` seconds.

    MPI cannot report the end of an operation by a callback. The first `looks` polls follow each other without a sleep. Later
    the sleeps between polls grow slowly. The error message ends with the text `late`.
    """
    for _ in range(looks):
        if look():
            return
        # Yield the core: if ranks share cores, the rank that this thread waits for may need the core.
        os.sched_yield()
    end = time.monotonic() + limit_s
    sleep_s = SHORTEST_SLEEP_S
    while not look():
        if time.monotonic() > end:
            raise CollectivesError(f"waited {limit_s:g} s {late}")
        time.sleep(sleep_s)
        sleep_s = min(sleep_s * 1.05, LONGEST_SLEEP_S)
