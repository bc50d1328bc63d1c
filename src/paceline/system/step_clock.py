"""Measure a worker's steps, waits, evaluations and checkpoints, in a memory-mapped file.

    <folder>/steps_<rank>       one record, which other processes read without the worker's help

Times are seconds of the machine's monotonic clock, which all processes share. Only times of the main thread count,
because waits of other threads do not delay the training.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from _thread import get_ident

# Don't import typing, which is slow to load: a worker loads this module before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

#: Kinds of measured time in the main thread: waits for data, waits for other ranks, evaluations, writes of checkpoints. Each
#: number is the offset in the record at which the start of the current period is stored; the total is stored before it.
DATA, WAIT, EVAL, SAVE = 24, 40, 56, 72
#: Layout of a record: number of optimizer steps, number of values of the most logged metric; then for each kind of time, the
#: total seconds and the start of the current period (0 if no period has started).
_RECORD = struct.Struct("<qq8d")
_STEPS, _TICKS = 0, 8
#: Maximum number of optimizers and of metric names to count: a script may have any number of them.
_MOST = 64
_DOUBLE, _LONG = struct.Struct("<d"), struct.Struct("<q")


class Counts:
    """The totals of a worker's step clock.

    Attributes:
        steps: Number of optimizer steps. Without an optimizer, the number of logged values of the most frequent metric.
        data_s, wait_s, eval_s, save_s: Seconds of waiting for data, of waiting for ranks, of evaluations and of saving.
    """

    __slots__ = ("data_s", "eval_s", "save_s", "steps", "wait_s")

    def __init__(self, steps: int, data_s: float, wait_s: float, eval_s: float = 0.0, save_s: float = 0.0) -> None:
        self.steps, self.data_s, self.wait_s, self.eval_s, self.save_s = steps, data_s, wait_s, eval_s, save_s


class StepClock:
    """The writer of a worker's file of steps and times."""

    def __init__(self, path: str) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _RECORD.size)
            self._memory = mmap.mmap(file, _RECORD.size)
        finally:
            os.close(file)
        # Workers create the clock in their main thread, the thread whose times are measured.
        self._main = get_ident()
        self._steps = self._ticks = 0
        self._totals = dict.fromkeys((DATA, WAIT, EVAL, SAVE), 0.0)
        self._optimizers: dict[int, int] = {}
        self._metrics: dict[str, int] = {}
        self._is_inside = False

    def step(self, optimizer: object) -> None:
        """Count a step of an optimizer. Of several optimizers, the one with most steps counts."""
        made = self._optimizers.get(id(optimizer), 0) + 1
        if made > 1 or len(self._optimizers) < _MOST:
            self._optimizers[id(optimizer)] = made
        if made > self._steps:
            self._steps = made
            _LONG.pack_into(self._memory, _STEPS, made)

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps in this process."""
        return self._steps

    def tick(self, metric: str) -> None:
        """Count a logged value of a metric as a step, for scripts without optimizers."""
        logged = self._metrics.get(metric, 0) + 1
        if logged > 1 or len(self._metrics) < _MOST:
            self._metrics[metric] = logged
        if logged > self._ticks:
            self._ticks = logged
            _LONG.pack_into(self._memory, _TICKS, logged)

    def waited(self, seconds: float) -> None:
        """Add seconds that the worker has waited for other ranks."""
        self._add(WAIT, seconds)

    def begin(self, what: int) -> float:
        """Record the start of a wait, an evaluation or a save.

        Return a value for `end`. The value is 0 if the period does not count, because it is in another thread or inside
        another period. what: `DATA`, `WAIT`, `EVAL` or `SAVE`.
        """
        if self._is_inside or get_ident() != self._main:
            return 0.0
        self._is_inside = True
        now = time.monotonic()
        _DOUBLE.pack_into(self._memory, what, now)
        return now

    def end(self, what: int, since: float) -> None:
        """Record the end of the period `what`. since: the value that `begin` returned."""
        if not since:
            return
        _DOUBLE.pack_into(self._memory, what, 0.0)
        self._add(what, time.monotonic() - since)
        self._is_inside = False

    def _add(self, what: int, seconds: float) -> None:
        self._totals[what] += seconds
        _DOUBLE.pack_into(self._memory, what - 8, self._totals[what])


def read(path: str) -> Counts | None:
    """Return a step clock's totals up to now, or None without a clock at `path`."""
    try:
        with open(path, "rb") as file:
            record = _RECORD.unpack(file.read(_RECORD.size))
    except (OSError, struct.error):
        return None
    steps, ticks, *times = record
    now = time.monotonic()
    totals = (
        total + (max(0.0, now - since) if since else 0.0) for total, since in zip(times[::2], times[1::2], strict=True)
    )
    return Counts(steps or ticks, *totals)


_clock: StepClock | None = None


def begin(environ: Mapping[str, str] = os.environ) -> StepClock | None:
    """Create and return this process's step clock; None without PACELINE_WATCH_DIR or on errors."""
    global _clock
    folder, rank = environ.get("PACELINE_WATCH_DIR"), environ.get("PACELINE_RANK")
    if folder and rank and _clock is None:
        try:
            _clock = StepClock(os.path.join(folder, f"steps_{rank}"))
        except (OSError, ValueError):  # disk full or folder missing: run without a clock
            return None
    return _clock


def clock() -> StepClock | None:
    """Return this process's step clock, or None."""
    return _clock


def timed(function: Callable[..., Any], what: int) -> Callable[..., Any]:
    """Wrap `function`, so that its time counts as `what`, such as `DATA` (waiting for data)."""
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


class counted:  # noqa: N801 - a context manager in the place of contextlib's, which loads slower than this module
    """A context manager that counts its block's time as `what`, such as `SAVE` (checkpoints)."""

    def __init__(self, what: int) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._clock = _clock
        self._since = 0.0 if self._clock is None else self._clock.begin(self._what)

    def __exit__(self, *error: object) -> None:
        if self._clock is not None:
            self._clock.end(self._what, self._since)


def _forget() -> None:
    # Drop the clock in a forked process, such as a data loader's, which shares the worker's memory but makes no steps.
    global _clock
    _clock = None


os.register_at_fork(after_in_child=_forget)
