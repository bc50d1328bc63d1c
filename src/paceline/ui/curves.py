"""A run's metrics as curves: read incrementally, and thinned to the pixels of a screen.

A curve has all values that one rank logged under one name in one attempt, so a zoomed view is exact. If a curve has more
points than pixels, each pixel shows a minimum and a maximum, so that no spike is lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter, le
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from paceline.runs.folder import RunFolder, load_logs, metric_logs, node_logs
from paceline.runs.metric_reader import FolderListing, LogTail
from paceline.runs.search.summaries import as_float

#: Maximum number of bytes to read from a log at once. A longer read would delay other requests.
_CHUNK = 1 << 17
#: Maximum number of seconds to read a run's logs before a page gets the values that were read.
READ_S = 0.1
#: From this many values of a metric on, one call that appends all values is faster than a call for each value.
_SEVERAL = 8
#: Largest step that a curve keeps; a value with a larger step counts as one without a step.
_MOST_STEP = 2**63 - 1
#: Maximum number of logged numbers to keep in memory for all runs together. They take some 40 MB.
_MOST_NUMBERS = 2_500_000
#: Maximum number of a run's rows, tables, images and texts whose log offsets are kept in memory. They take some 30 MB.
_MOST_OTHERS = 100_000


@dataclass(frozen=True, order=True)
class Key:
    """The key of a metric's curve. rank: a rank, or a node's number."""

    name: str
    rank: int
    attempt: int
    is_node: bool = False


@dataclass
class Curve:
    """The values of a metric's curve.

    steps: Valid only if each value has a step (`has_steps`). times: Seconds since 1970; empty unless `RunCurves.has_times`.
    """

    ys: array[float] = field(default_factory=lambda: array("d"))
    steps: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))
    has_steps: bool = True
    has_nan: bool = False
    is_sorted: bool = True

    def add(self, ys: array[float], steps: array[float] | None, times: array[float] | None) -> None:
        start = len(self.ys)
        self.ys.extend(ys)
        if times is not None:
            self.times.extend(times)
        if steps is None:
            self.has_steps = False
        elif self.has_steps:
            self.steps.extend(steps)
            tail = self.steps[max(0, start - 1) :]
            self.is_sorted = self.is_sorted and all(map(le, tail, tail[1:]))
        if not self.has_nan:
            # Check only the sum: it is NaN or infinite if any of the numbers is NaN or infinite.
            self.has_nan = not math.isfinite(sum(ys))

    def add_one(self, y: float, step: float | None, time_s: float | None) -> None:
        """Add one value to the curve, ten times as fast as `add`."""
        self.ys.append(y)
        if time_s is not None:
            self.times.append(time_s)
        if step is None:
            self.has_steps = False
        elif self.has_steps:
            self.is_sorted = self.is_sorted and (not self.steps or self.steps[-1] <= step)
            self.steps.append(step)
        self.has_nan = self.has_nan or not math.isfinite(y)

    def xs(self, axis: str, origin_s: float) -> Any:
        """Return the x values for the axis "step", "time" or "relative" (to `origin_s`).

        On the axis "step", x is the index of a value if any value of the curve lacks a step.
        """
        if axis == "time":
            return self.times
        if axis == "relative":
            return array("d", (time - origin_s for time in self.times))
        return self.steps if self.has_steps else range(len(self.ys))


class Other(NamedTuple):
    """A logged row, table, image or text, and its position in the log."""

    kind: str
    rank: int
    attempt: int
    step: int | None
    path: Path
    start: int
    size: int

    def read(self) -> object:
        """Return the logged value, or None if its log was removed or replaced."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                line = json.loads(file.read(self.size))
        except (OSError, ValueError):
            return None
        return line.get("value") if isinstance(line, dict) else None


class _Scalar(msgspec.Struct, gc=False):
    """A logged number. Lines with tables or images fail to decode as this type."""

    name: str
    value: float
    time: float = math.nan
    step: Annotated[int, msgspec.Meta(ge=-_MOST_STEP, le=_MOST_STEP)] | None = None
    kind: None = None


_SCALAR = msgspec.json.Decoder(_Scalar)
_VALUE, _TIME, _STEP = map(attrgetter, ("value", "time", "step"))


class _Log:
    """A reader of one metric log, which may still grow."""

    def __init__(self, path: Path, rank: int, attempt: int, *, is_node: bool = False) -> None:
        self._path, self._tail = path, LogTail(path)
        self._rank, self._attempt, self._is_node = rank, attempt, is_node
        #: Name of a metric -> its curve, for the attempt whose lines are being read.
        self._curves: dict[str, Curve] = {}

    def read_on(self, into: RunCurves) -> Iterator[None]:
        """Read the log's new lines, and yield after each chunk."""
        with contextlib.suppress(OSError):
            for data in self._tail.chunks(_CHUNK):
                self._take(data, self._tail.position - len(data), into)
                yield

    def _take(self, data: bytes, start: int, into: RunCurves) -> None:
        if (scalars := _scalars(data)) is not None:
            self._add(scalars, into)
            return
        # Before a line that is not a scalar, store the scalars read so far. This keeps the values of a name in order.
        scalars = []
        for line in data.split(b"\n"):
            place, start = start, start + len(line) + 1
            try:
                scalars.append(_SCALAR.decode(line))
            except (ValueError, RecursionError):
                self._add(scalars, into)
                scalars = []
                with contextlib.suppress(ValueError, RecursionError):
                    self._take_other(json.loads(line), place, len(line), into)
        self._add(scalars, into)

    def _add(self, scalars: Iterable[_Scalar], into: RunCurves) -> None:
        """Add numbers of the present attempt to their curves."""
        by_name: defaultdict[str, list[_Scalar]] = defaultdict(list)
        for scalar in scalars:
            by_name[scalar.name].append(scalar)
        for name, mine in by_name.items():
            curve = self._curves.get(name)
            if curve is None:
                curve = self._curves[name] = into.curve(Key(name, self._rank, self._attempt, self._is_node))
            into.size += len(mine)
            if len(mine) < _SEVERAL:
                for one in mine:
                    curve.add_one(one.value, one.step, one.time if into.has_times else None)
                continue
            steps = [*map(_STEP, mine)]
            curve.add(
                array("d", map(_VALUE, mine)),
                None if None in steps else array("d", steps),
                array("d", map(_TIME, mine)) if into.has_times else None,
            )

    def _take_other(self, line: Any, start: int, size: int, into: RunCurves) -> None:
        if not isinstance(line, dict) or not isinstance(name := line.get("name"), str):
            if isinstance(line, dict) and type(attempt := line.get("attempt")) is int:
                # Earlier versions of Paceline wrote all attempts into one file. In it, a line with "attempt" begins an attempt.
                self._attempt = attempt
                self._curves = {}
            return
        kind, value = line.get("kind"), line.get("value")
        time_s = as_float(line["time"]) if isinstance(line.get("time"), (int, float)) else math.nan
        step = line["step"] if type(line.get("step")) is int and abs(line["step"]) <= _MOST_STEP else None
        items: list[Any] = value if kind == "list" and isinstance(value, list) else [value] if kind is None else []
        if items and all(type(item) in (int, float, bool) for item in items):
            curve = into.curve(Key(name, self._rank, self._attempt, self._is_node))
            numbers = [*map(as_float, items)]
            into.size += len(numbers)
            given = None if step is None else array("d", [float(step)] * len(numbers))
            curve.add(array("d", numbers), given, array("d", [time_s] * len(numbers)) if into.has_times else None)
        else:
            kind = kind if isinstance(kind, str) else "value"
            into.add_other(name, Other(sys.intern(kind), self._rank, self._attempt, step, self._path, start, size))


class RunCurves:
    """All curves of a run, for one thread at a time.

    has_times: Whether to keep the time of each value, which only the axes of time need.
    """

    def __init__(self, folder: RunFolder, *, has_times: bool = False) -> None:
        self.has_times = has_times
        self._directory = folder.metrics
        self._logs: dict[Path, _Log] = {}
        self._listing = FolderListing(folder.metrics)
        self.curves: dict[Key, Curve] = {}
        self._attempts: set[int] = set()
        #: Logged values that no curve can show, such as tables and images, by name.
        self.others: dict[str, list[Other]] = {}
        #: Number of logged values that no curve can show.
        self.other_count = 0
        #: Count of the numbers that this object keeps in memory.
        self.size = 0
        #: Whether the last call of `look` ended before it had read all logs.
        self.has_more = False

    def look(self, most_s: float = math.inf) -> bool:
        """Read new lines of the metric logs for at most `most_s` seconds. Return False without new lines."""
        self._list()
        until_s, came, self.has_more = time.monotonic() + most_s, False, False
        for log in self._logs.values():
            for _ in log.read_on(self):
                came = True
                if time.monotonic() > until_s:
                    self.has_more = True
                    return True
        return came

    def curve(self, key: Key) -> Curve:
        try:
            return self.curves[key]
        except KeyError:
            self._attempts.add(key.attempt)
            return self.curves.setdefault(key, Curve())

    def add_other(self, name: str, other: Other) -> None:
        self.other_count += 1
        logged = self.others.setdefault(name, [])
        logged.append(other)
        if self.other_count > _MOST_OTHERS:
            # Drop the oldest tenth of the values, so that the newest values of this name are kept.
            del logged[: max(1, len(logged) // 10)]

    def cuts(self, key: Key) -> list[tuple[float, float]]:
        """Return (first, last) of each range of steps that later attempts logged again."""
        others = (replace(key, attempt=number) for number in sorted(self._attempts) if number > key.attempt)
        later = [
            (other.attempt, curve)
            for other in others
            if (curve := self.curves.get(other)) is not None and curve.has_steps and len(curve.ys)
        ]
        last = max((attempt for attempt, _ in later), default=0)
        return [(min(curve.steps), math.inf if attempt == last else max(curve.steps)) for attempt, curve in later]

    def _list(self) -> None:
        if not self._listing.is_due():
            return
        for rank, paths in metric_logs(self._directory).items():
            for attempt, path in paths.items():
                if path not in self._logs:
                    self._logs[path] = _Log(path, rank, attempt)
        # Logs of the workers' CPU and memory load belong to the nodes, too. Their metric names begin with `rank_`.
        for find in (node_logs, load_logs):
            for number, path in find(self._directory).items():
                if path not in self._logs:
                    self._logs[path] = _Log(path, number, 1, is_node=True)


def _scalars(data: bytes) -> list[_Scalar] | None:
    """Return the numbers in a log's lines, or None if a line has another value."""
    with contextlib.suppress(ValueError, RecursionError):
        return _SCALAR.decode_lines(data)
    if b":NaN" in data or b"Infinity" in data:
        # Only Python's own JSON parser reads NaN and Infinity.
        with contextlib.suppress(ValueError, RecursionError):
            lines = json.loads(b"[%s]" % data.rstrip().replace(b"\n", b","))
            return msgspec.convert(lines, list[_Scalar])
    return None


def thinned(
    curve: Curve,
    pixels: int,
    *,
    axis: str = "step",
    origin_s: float = 0.0,
    window: tuple[float, float] | None = None,
    cuts: Collection[tuple[float, float]] = (),
) -> tuple[list[float | None], list[float | None]]:
    """Return x and y to draw: at most a minimum and maximum per pixel.

    A value that is not finite becomes None, which is drawn as a gap.

    window: The visible (first, last) x. The result has one more point at each end, so that the line reaches the edge.
    cuts: Ranges (first, last) of steps to leave out, from `RunCurves.cuts`.
    """
    xs: Any = curve.xs(axis, origin_s)
    ys: Any = curve.ys
    if cuts and curve.has_steps:
        kept = [n for n, step in enumerate(curve.steps) if not any(low <= step <= high for low, high in cuts)]
        xs, ys = [xs[n] for n in kept], [ys[n] for n in kept]
    if window is not None:
        if curve.is_sorted or axis != "step":
            low, high = max(0, bisect_left(xs, window[0]) - 1), bisect_right(xs, window[1]) + 1
            xs, ys = xs[low:high], ys[low:high]
        else:
            kept = [n for n, x in enumerate(xs) if window[0] <= x <= window[1]]
            xs, ys = [xs[n] for n in kept], [ys[n] for n in kept]
    if len(ys) > 2 * pixels:
        places = list(_extremes(ys, pixels, has_nan=curve.has_nan))
        return _plain([xs[n] for n in places]), [finite(ys[n]) for n in places]
    return _plain(xs), [finite(y) for y in ys] if curve.has_nan else list(ys)


def _extremes(ys: Any, pieces: int, *, has_nan: bool) -> Iterator[int]:
    count = len(ys)
    for piece in range(pieces):
        low, high = piece * count // pieces, (piece + 1) * count // pieces
        # Copy into a list, because an `array` creates a new Python object at each access.
        part = list(ys[low:high])
        if has_nan:
            finite = [n for n, y in enumerate(part) if math.isfinite(y)]
            if not finite:
                yield low
                continue
            least, greatest = min(finite, key=part.__getitem__), max(finite, key=part.__getitem__)
        else:
            least, greatest = part.index(min(part)), part.index(max(part))
        first, second = sorted((least, greatest))
        yield low + first
        if second != first:
            yield low + second


def _plain(xs: Any) -> list[float | None]:
    try:
        whole = [*map(int, xs)]
    except (ValueError, OverflowError):
        whole = []
    # If all steps are whole numbers, as usual, don't call `finite`, which is slow. A comparison of runs may have 100,000 steps.
    return [*whole] if whole == [*xs] and max(map(abs, whole), default=0) < 10**15 else [finite(x) for x in xs]


def finite(number: float) -> float | None:
    """Return a number for JSON: None if it is not finite, an integer for 3.0."""
    if not math.isfinite(number):
        return None
    return int(number) if number == int(number) and abs(number) < 1e15 else number


class CurveStore:
    """A cache of the curves of recently shown runs."""

    def __init__(self, most_numbers: int = _MOST_NUMBERS) -> None:
        self._most_numbers = most_numbers
        self._lock = threading.Lock()
        self._runs: dict[tuple[Path, bool], tuple[threading.Lock, RunCurves]] = {}
        #: Number of callers that read curves now.
        self._open = 0

    def is_open(self) -> bool:
        """Return whether a request reads any run's curves now."""
        return self._open > 0

    @contextlib.contextmanager
    def open(self, folder: RunFolder, *, has_times: bool = False) -> Iterator[RunCurves]:
        """Yield a run's curves, which other threads can't use during the `with` block.

        Call `look` of the curves to read new lines of the logs.
        """
        key = (folder.path, has_times)
        with self._lock:
            known = (
                self._runs.pop(key) if key in self._runs else (threading.Lock(), RunCurves(folder, has_times=has_times))
            )
            # Move the run to the end of the dictionary, whose first run is the least recently used one.
            self._runs[key] = known
            self._open += 1
            while len(self._runs) > 1 and sum(one.size for _, one in self._runs.values()) > self._most_numbers:
                del self._runs[next(iter(self._runs))]
        try:
            with known[0]:
                yield known[1]
        finally:
            with self._lock:
                self._open -= 1
