"""Summaries of a run's metrics: last, best, smallest and largest value, and count.

These rules hold in the page, on the command line, in Python and in comparisons:

- If several ranks log a name, the lowest of these ranks counts, as for the metric of a sweep.
- A later attempt replaces the values of earlier attempts from its first step on (`paceline.runs.metrics`).
- last is the last logged number, which may be NaN. min, max and best ignore NaN. count is how many numbers were logged.
- best is min or max. For a sweep's own metric, the sweep's goal decides. For other metrics, a word in the name decides,
  such as "loss" or "acc". Without such a word, there is no best value.
"""

from __future__ import annotations

import heapq
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast

from paceline.runs.folder import metric_logs
from paceline.runs.metric_reader import FolderListing, LogTail, MetricEntry, parsed
from paceline.runs.metrics import placed_entries_by_name
from paceline.runs.search.params import Names, names_of
from paceline.system.files import gone_is_fine

Goal = Literal["minimize", "maximize"]

#: Maximum number of metrics of a run that get a summary: the metrics that the run logged first.
MOST_METRICS = 20_000
_CHUNK_BYTES = 1 << 21
_SUMMARY, _NUMBER = struct.Struct("4d"), struct.Struct("d")
#: Statistic -> its offset in bytes in a packed summary.
_OFFSETS = {"last": 0, "min": 8, "max": 16, "count": 24}
_MINIMIZED = "loss losses error errors err mse mae rmse mape nll perplexity ppl wer cer fid kl regret cost latency"
_MAXIMIZED = (
    "acc accuracy top1 top5 auc auroc f1 precision recall map ap bleu rouge iou miou dice r2 psnr ssim reward return score "
    "throughput mrr ndcg"
)
#: Word that may occur in a metric's name -> whether to minimize or maximize this metric.
_GOALS: dict[str, Goal] = {
    **dict.fromkeys(_MINIMIZED.split(), "minimize"),
    **dict.fromkeys(_MAXIMIZED.split(), "maximize"),
}


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """The summary of one metric of a run.

    last: The last number, which may be NaN. min, max: None if all numbers are NaN. goal: "minimize", "maximize", or
    None if it is unknown.

    Examples:
        >>> MetricFacts(last=0.3, min=0.25, max=2.0, count=10, goal="minimize").best
        0.25
    """

    last: float
    min: float | None
    max: float | None
    count: int
    goal: Goal | None = None

    @property
    def best(self) -> float | None:
        """The best number by `goal`; None without a goal."""
        return {"minimize": self.min, "maximize": self.max}.get(self.goal or "")


@lru_cache(maxsize=2 * MOST_METRICS)
def goal_of(name: str) -> Goal | None:
    """Return "minimize" or "maximize" by a word in the metric's name, or None.

    Examples:
        >>> goal_of("val/top1_acc"), goal_of("train_loss"), goal_of("lr")
        ('maximize', 'minimize', None)
    """
    words = re.findall(r"[a-z]+[0-9]*", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    return next((_GOALS[word] for word in words if word in _GOALS), None)


class MetricSummaries(Mapping[str, MetricFacts]):
    """The packed summaries of a run's metrics by name."""

    __slots__ = ("_goals", "_names", "_numbers")

    def __init__(self, names: Names, numbers: bytes, goals: Mapping[str, Goal] | None = None) -> None:
        self._names = names
        self._numbers = numbers
        self._goals = goals

    def __getitem__(self, name: str) -> MetricFacts:
        at = _SUMMARY.size * self._names.at[name]
        last, least, most, count = _SUMMARY.unpack_from(self._numbers, at)
        goal = self.goal(name)
        has_numbers = not math.isnan(least)
        return MetricFacts(last, least if has_numbers else None, most if has_numbers else None, int(count), goal)

    def __eq__(self, other: object) -> bool:
        # Compare the packed bytes, in which NaN equals NaN.
        same = isinstance(other, MetricSummaries) and self._names is other._names and self.goals == other.goals
        return same and self._numbers == cast("MetricSummaries", other)._numbers

    __hash__ = None  # type: ignore[assignment]

    @property
    def names(self) -> Names:
        """The names of the metrics, in a table for all runs with these names."""
        return self._names

    @property
    def goals(self) -> Mapping[str, Goal]:
        """The goals of those metrics that a sweep optimizes."""
        return self._goals or {}

    def value(self, name: str, statistic: str = "last") -> float | None:
        """Return a metric's statistic, such as "last" or "best", or None."""
        place = self._names.at.get(name)
        if statistic == "best":
            statistic = {"minimize": "min", "maximize": "max"}.get(self.goal(name) or "", "")
        offset = _OFFSETS.get(statistic)
        if place is None or offset is None:
            return None
        return cast("float", _NUMBER.unpack_from(self._numbers, _SUMMARY.size * place + offset)[0])

    def goal(self, name: str) -> Goal | None:
        """Return "minimize" or "maximize" by the sweep or the metric's name, or None."""
        return (self._goals or {}).get(name) or goal_of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.at)

    def __len__(self) -> int:
        return len(self._names.at)

    def with_goals(self, goals: Mapping[str, Goal] | None) -> MetricSummaries:
        """Return these summaries with a sweep's goals, such as "minimize"."""
        return MetricSummaries(self._names, self._numbers, goals or None)

    def to_json(self) -> dict[str, list[float]]:
        """Return {name: (last, min, max, count)}. If all numbers are NaN, so are min and max."""
        return dict(zip(self, map(list, _SUMMARY.iter_unpack(self._numbers)), strict=True))

    @classmethod
    def of(cls, numbers: Mapping[str, Iterable[float]], goals: Mapping[str, Goal] | None = None) -> MetricSummaries:
        """Return the summaries of metrics, given {name: (last, min, max, count)}."""
        return cls(
            names_of(tuple(numbers)), b"".join(_SUMMARY.pack(*values) for values in numbers.values()), goals or None
        )


NO_METRICS = MetricSummaries(names_of(()), b"")


def headline(metrics: MetricSummaries, most: int) -> list[tuple[str, float]]:
    """Return (name, last value) of the `most` most important metrics, validation first."""
    return [(name, cast("float", metrics.value(name))) for name in _first(metrics.names, most)]


# Cache the result for each set of names, because most runs of a workspace have the same metric names.
@lru_cache(maxsize=64)
def _first(names: Names, most: int) -> list[str]:
    lower = {name: name.lower() for name in names.at}
    first = ("val", "test", "eval")
    return heapq.nsmallest(
        most, lower, key=lambda name: (not lower[name].startswith(first), "loss" not in lower[name], name)
    )


def main_metric(metrics: MetricSummaries) -> str | None:
    """Return the name of the sweep's metric, else the first of `headline`; None without metrics.

    Examples:
        >>> main_metric(MetricSummaries.of({"loss": (0.1, 0.1, 0.1, 1), "val_acc": (0.9, 0.9, 0.9, 1)}))
        'val_acc'
    """
    own = (name for name in metrics.goals if name in metrics)
    return next(own, None) or next((name for name, _ in headline(metrics, 1)), None)


class SummaryReader:
    """A reader of a run's metric logs; each call reads only new lines.

    pause: Called before each piece of a log, which may be long.
    """

    def __init__(self, directory: Path, pause: Callable[[], None] = lambda: None) -> None:
        self._directory, self._pause = directory, pause
        self._listing = FolderListing(directory)
        self._logs: dict[int, dict[int, Path]] = {}
        self._read: dict[Path, _Log] = {}
        self._joined: dict[int, tuple[list[int], dict[str, list[float]]]] = {}

    def look(self) -> MetricSummaries:
        """Read new lines. Return the summaries of all values logged so far."""
        if self._listing.is_due():
            self._logs = metric_logs(self._directory)
        found: dict[str, list[float]] = {}
        for rank, attempts in self._logs.items():
            numbers = self._of_rank(rank, attempts)
            new = [name for name in numbers if name not in found]
            found |= {name: numbers[name] for name in new[: MOST_METRICS - len(found)]}
        return MetricSummaries.of(found)

    def _of_rank(self, rank: int, attempts: Mapping[int, Path]) -> dict[str, list[float]]:
        if len(attempts) == 1:
            (path,) = attempts.values()
            log = self._read.setdefault(path, _Log(path))
            log.look(self._pause)
            if len(log.attempts) <= 1:
                return log.numbers
        sizes = []
        for path in attempts.values():
            with gone_is_fine():
                sizes.append(path.stat().st_size)
        known = self._joined.get(rank)
        if known is None or known[0] != sizes:
            numbers: dict[str, list[float]] = {}
            with gone_is_fine():
                for entries in placed_entries_by_name(self._directory, ranks=(rank,)).values():
                    for entry in entries:
                        _add(numbers, entry)
            known = self._joined[rank] = (sizes, numbers)
        return known[1]


class _Log:
    def __init__(self, path: Path) -> None:
        self._tail = LogTail(path)
        self.numbers: dict[str, list[float]] = {}
        self.attempts: set[int] = set()

    def look(self, pause: Callable[[], None]) -> None:
        with gone_is_fine():
            for chunk in self._tail.chunks(_CHUNK_BYTES):
                pause()
                for entry in parsed(chunk):
                    if not isinstance(entry, dict):
                        continue
                    if "name" in entry:
                        _add(self.numbers, cast("MetricEntry", entry))
                    elif type(attempt := entry.get("attempt")) is int:
                        self.attempts.add(attempt)


def _add(numbers: dict[str, list[float]], entry: MetricEntry) -> None:
    name, value = entry["name"], entry.get("value")
    if entry.get("kind") == "list" and isinstance(value, list):
        for item in value:
            _add(numbers, {"name": name, "value": item})
    # Compare exact types, because isinstance(True, int) is true.
    elif type(value) in (float, int) and entry.get("kind") in (None, "list") and isinstance(name, str):
        number = as_float(cast("float", value))
        known = numbers.get(name)
        if known is None:
            if len(numbers) < MOST_METRICS:
                numbers[name] = [number, number, number, 1]
            return
        known[0] = number
        known[3] += 1
        # Don't let NaN become the min or max, and replace a first value of NaN. All comparisons with NaN are False.
        if not math.isnan(number):
            known[1] = number if not known[1] <= number else known[1]
            known[2] = number if not known[2] >= number else known[2]


def as_float(number: float) -> float:
    """Return a number as a float; an integer that is too large becomes infinity."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
