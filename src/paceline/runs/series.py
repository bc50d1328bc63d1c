"""Series of metrics: each value with its step and time, over all attempts; and their plots.

A metric with one value has the same form as a metric with many values, unlike in the Azure SDK's `get_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.runs.metric_reader import MetricEntry
from paceline.runs.metrics import placed_entries_by_name
from paceline.runs.search.summaries import as_float

_COLUMNS = 3
_WIDTH, _HEIGHT = 4.2, 2.8


@dataclass(frozen=True, kw_only=True)
class MetricSeries:
    """The values logged under one name, ordered by time.

    Attributes:
        steps: The step of each value, or None.
        values: The logged values. Each item of a list is one value. A row or table is a dict, an image a file name.
        times: Seconds since 1970, by the worker's clock.
        ranks: The rank that logged each value.
        attempts: The number, from 1, of the attempt in which each value was logged.
    """

    name: str
    steps: tuple[int | None, ...] = ()
    values: tuple[Any, ...] = ()
    times: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    attempts: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int | None, Any, float]]:
        """Yield (step, value, time) of each value."""
        return iter(zip(self.steps, self.values, self.times, strict=True))

    def to_pandas(self) -> Any:
        """Return a pandas frame with one row per value.

        Its columns are `step` (Int64 with missing values), `value`, `time` (datetime64[ns, UTC]), `rank` and `attempt`.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas() needs pandas: pip install 'paceline[tabular]'.") from error
        return pandas.DataFrame(
            {
                # Use pandas' Int64, which allows missing values, unlike int64.
                "step": pandas.array(list(self.steps), dtype="Int64"),
                # Set a type if the list is empty, because pandas would give an empty column the type object.
                "value": pandas.Series(list(self.values), dtype=None if self.values else "float64"),
                # Round to the microseconds of the logs, since floats of seconds since 1970 are not exact.
                "time": pandas.to_datetime(pandas.Series(self.times, dtype="float64"), unit="s", utc=True).dt.round(
                    "us"
                ),
                "rank": pandas.Series(self.ranks, dtype="int64"),
                "attempt": pandas.Series(self.attempts, dtype="int64"),
            }
        )

    @property
    def last(self) -> Any:
        """The last value; None for an empty series."""
        return self.values[-1] if self.values else None

    @property
    def last_step(self) -> int | None:
        """The step of the last value, or None without a step."""
        return self.steps[-1] if self.steps else None

    @property
    def min(self) -> float | int | None:
        """The smallest number, ignoring NaN, or None without a number."""
        return min(self._numbers(), default=None)

    @property
    def max(self) -> float | int | None:
        """The largest number, ignoring NaN, or None without a number."""
        return max(self._numbers(), default=None)

    def _numbers(self) -> list[float | int]:
        # Compare exact types, because isinstance(True, int) is true.
        return [
            value for value in self.values if type(value) is int or (type(value) is float and not math.isnan(value))
        ]


def read(
    directory: Path,
    *,
    name: str | None = None,
    rank: int | Collection[int] | None = None,
    attempt: int | Collection[int] | None = None,
) -> dict[str, MetricSeries]:
    """Return the series of each metric in `directory`, in order of first appearance.

    name: Return only this metric. rank: Return only values of these ranks. attempt: Return only values of these
    attempts. Several attempts are joined as if the run had not been interrupted. If one name was logged with several
    types, such as scalar and image, only values of the last type are returned, as in `paceline.runs.metrics.read`.
    """
    found = placed_entries_by_name(directory, name=name, ranks=_several(rank), attempts=_several(attempt))
    return {metric: series_of(metric, entries) for metric, entries in found.items()}


def milliseconds(time_s: float) -> int:
    """Return a time in milliseconds; 0 for NaN and infinity."""
    time_ms = 1000 * as_float(time_s)
    return round(time_ms) if math.isfinite(time_ms) else 0


def series_of(name: str, entries: list[MetricEntry]) -> MetricSeries:
    """Return a metric's series from log entries with `rank` and `attempt`."""
    kinds = {entry.get("kind") for entry in entries}
    if not kinds <= {None, "list"}:
        kind = entries[-1].get("kind")
        entries = [entry for entry in entries if entry.get("kind") == kind]
    steps, values, times, ranks, attempts = [], [], [], [], []
    for entry in entries:
        items = entry.get("value")
        for item in items if entry.get("kind") == "list" and isinstance(items, list) else [items]:
            steps.append(entry.get("step"))
            values.append(item)
            times.append(entry.get("time", math.nan))
            ranks.append(entry["rank"])
            attempts.append(entry["attempt"])
    return MetricSeries(
        name=name,
        steps=tuple(steps),
        values=tuple(values),
        times=tuple(times),
        ranks=tuple(ranks),
        attempts=tuple(attempts),
    )


def _several(numbers: int | Collection[int] | None) -> Collection[int] | None:
    return (numbers,) if isinstance(numbers, int) else numbers


def plot(found: Mapping[str, MetricSeries], title: str) -> Any:
    """Return a matplotlib figure: a subplot per numeric metric, a curve per rank.

    The x axis is the step. If values have no steps, the x axis is the index of the value.

    Raises:
        UserError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plot() needs matplotlib: pip install matplotlib.") from error
    curves = {name: drawn for name, one in found.items() if (drawn := _curves(one))}
    if not curves:
        raise UserError(f"{title} has no metric with numbers to draw.")
    columns = min(_COLUMNS, len(curves))
    rows = math.ceil(len(curves) / columns)
    # Don't use pyplot, because pyplot would keep the figure in memory and might open a window.
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    figure.suptitle(_no_math(title))
    for number, (name, drawn) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for label, (steps, values) in drawn.items():
            # A line through a single value is invisible, so draw a marker for the value.
            axes.plot(steps, values, marker="o" if len(values) == 1 else None, label=label)
        axes.set_title(_no_math(name), fontsize="medium")
        axes.grid(alpha=0.3)
        if len(drawn) > 1:
            axes.legend(fontsize="small")
    return figure


def _curves(one: MetricSeries) -> dict[str, tuple[list[float], list[float]]]:
    found: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for step, value, rank, attempt in zip(one.steps, one.values, one.ranks, one.attempts, strict=True):
        if isinstance(value, (int, float)):
            steps, values = found.setdefault((rank, attempt), ([], []))
            steps.append(len(steps) if step is None else step)
            values.append(value)
    several = len({attempt for _, attempt in found}) > 1
    return {
        f"rank {rank}" + (f", attempt {attempt}" if several else ""): drawn for (rank, attempt), drawn in found.items()
    }


def _no_math(text: str) -> str:
    # Escape dollars, because matplotlib reads text between two of them as mathematics.
    return text.replace("$", r"\$")
