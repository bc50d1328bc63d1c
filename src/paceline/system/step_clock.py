"""How a worker's time goes: steps made, time spent on waiting for data and for other ranks, in a file of memory.

    <folder>/steps_<rank>       one record, written at next to no cost, read by others without the worker's help

Times are seconds of the machine's monotonic clock, which all its processes share. Only the main thread counts: what other
threads do beside it keeps nobody waiting.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from _thread import get_ident

# Not typing's: a worker loads this before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

#: Of the optimizer, of the metric that is logged most; seconds in data, in waiting; since when it is in either, 0 if it is not.
_RECORD = struct.Struct("<qqdddd")
_STEPS, _TICKS, _DATA, _WAIT, _DATA_SINCE, _WAIT_SINCE = (8 * place for place in range(6))
#: Of optimizers and of metrics' names, which may have no end.
_MOST = 64
_DOUBLE, _LONG = struct.Struct("<d"), struct.Struct("<q")


class Counts:
    """What a clock has counted so far. steps: of the optimizer, or values of one metric; 0 where neither is known."""

    __slots__ = ("data_s", "steps", "wait_s")

    def __init__(self, steps: int, data_s: float, wait_s: float) -> None:
        self.steps, self.data_s, self.wait_s = steps, data_s, wait_s


class StepClock:
    """One worker's clock, for the process that writes it."""

    def __init__(self, path: str) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _RECORD.size)
            self._memory = mmap.mmap(file, _RECORD.size)
        finally:
            os.close(file)
        # A worker begins in its main thread.
        self._main = get_ident()
        self._steps = self._ticks = 0
        self._data_s = self._wait_s = 0.0
        self._optimizers: dict[int, int] = {}
        self._metrics: dict[str, int] = {}
        self._is_inside = False

    def step(self, optimizer: object) -> None:
        """Count a step of an optimizer. Of several, the one counts that has made most."""
        made = self._optimizers.get(id(optimizer), 0) + 1
        if made > 1 or len(self._optimizers) < _MOST:
            self._optimizers[id(optimizer)] = made
        if made > self._steps:
            self._steps = made
            _LONG.pack_into(self._memory, _STEPS, made)

    @property
    def steps(self) -> int:
        """How many it has counted."""
        return self._steps

    def tick(self, metric: str) -> None:
        """Count a value of a metric. Of several, the one counts that was logged most often."""
        logged = self._metrics.get(metric, 0) + 1
        if logged > 1 or len(self._metrics) < _MOST:
            self._metrics[metric] = logged
        if logged > self._ticks:
            self._ticks = logged
            _LONG.pack_into(self._memory, _TICKS, logged)

    def waited(self, seconds: float) -> None:
        """Add time that was spent on waiting for other ranks, measured elsewhere."""
        self._wait_s += seconds
        _DOUBLE.pack_into(self._memory, _WAIT, self._wait_s)

    def begin(self, what: int) -> float:
        """Note that the main thread begins to wait: for `DATA`, or for others (`WAIT`). For `end`; 0 where it does not count,
        for it is another thread, or inside of one that does.
        """
        if self._is_inside or get_ident() != self._main:
            return 0.0
        self._is_inside = True
        now = time.monotonic()
        _DOUBLE.pack_into(self._memory, what, now)
        return now

    def end(self, what: int, since: float) -> None:
        """Note that it goes on."""
        if not since:
            return
        _DOUBLE.pack_into(self._memory, what, 0.0)
        passed = time.monotonic() - since
        if what == DATA:
            self._data_s += passed
            _DOUBLE.pack_into(self._memory, _DATA, self._data_s)
        else:
            self._wait_s += passed
            _DOUBLE.pack_into(self._memory, _WAIT, self._wait_s)
        self._is_inside = False


#: What may be waited for, as `StepClock.begin` is told.
DATA, WAIT = _DATA_SINCE, _WAIT_SINCE


def read(path: str) -> Counts | None:
    """What a clock has counted, with the wait that is under way; None where there is no clock."""
    try:
        with open(path, "rb") as file:
            record = _RECORD.unpack(file.read(_RECORD.size))
    except (OSError, struct.error):
        return None
    steps, ticks, data_s, wait_s, data_since, wait_since = record
    now = time.monotonic()
    if data_since:
        data_s += max(0.0, now - data_since)
    if wait_since:
        wait_s += max(0.0, now - wait_since)
    return Counts(steps or ticks, data_s, wait_s)


_clock: StepClock | None = None


def begin(environ: Mapping[str, str] = os.environ) -> StepClock | None:
    """Make this process's clock, where whoever has started it wants one; it is the one of `clock` from now on."""
    global _clock
    folder, rank = environ.get("PACELINE_WATCH_DIR"), environ.get("PACELINE_RANK")
    if folder and rank and _clock is None:
        try:
            _clock = StepClock(os.path.join(folder, f"steps_{rank}"))
        except (OSError, ValueError):  # no room, or no such folder: a run goes on without
            return None
    return _clock


def clock() -> StepClock | None:
    """This process's clock; None where none was begun, as in a process that a worker has forked."""
    return _clock


def timed(function: Callable[..., Any], what: int) -> Callable[..., Any]:
    """The function, its time counted as waiting for `what`."""
    import functools

    @functools.wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        found = _clock
        if found is None:
            return function(*given, **options)
        since = found.begin(what)
        try:
            return function(*given, **options)
        finally:
            found.end(what, since)

    return call


def _forget() -> None:
    # A data loader's worker shares the memory, and makes no steps.
    global _clock
    _clock = None


os.register_at_fork(after_in_child=_forget)
