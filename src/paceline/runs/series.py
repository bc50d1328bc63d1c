"""A metric as it was logged: every value with its step and its time, over all attempts as one series.

`get_metrics` of the Azure SDK gives values alone, and a single value in another shape than several; this always gives the
same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.runs.metrics import placed_entries_by_name

_COLUMNS = 3
_WIDTH, _HEIGHT = 4.2, 2.8


@dataclass(frozen=True, kw_only=True)
class MetricSeries:
    """The values that were logged under one name, in order of time over all ranks; five tuples of one length.

    steps: the step given with a value, None where there was none. values: as logged; a list's items one by one; of a row or
    a table its dict; of an image its file's name. times: seconds since 1970, by the clock of the worker's machine.
    ranks, attempts: which worker logged a value, and in which attempt of the run, from 1.
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
        """(step, value, time) of each value."""
        return iter(zip(self.steps, self.values, self.times, strict=True))

    def to_pandas(self) -> Any:
        """The same as a pandas frame, one row a value: `step` (Int64, missing where none was given), `value`, `time`
        (datetime64[ns, UTC]), `rank`, `attempt`.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas() needs pandas: pip install 'paceline[tabular]'.") from error
        return pandas.DataFrame(
            {
                # Int64, with a capital letter, is pandas' own kind of integers, some of which may be missing.
                "step": pandas.array(list(self.steps), dtype="Int64"),
                # Of an empty list pandas would make a column of objects.
                "value": pandas.Series(list(self.values), dtype=None if self.values else "float64"),
                # At this date a float of seconds is exact to a quarter of a microsecond; logs have microseconds.
                "time": pandas.to_datetime(pandas.Series(self.times, dtype="float64"), unit="s", utc=True).dt.round(
                    "us"
                ),
                "rank": pandas.Series(self.ranks, dtype="int64"),
                "attempt": pandas.Series(self.attempts, dtype="int64"),
            }
        )

    @property
    def last(self) -> Any:
        """The value that was logged last; None of an empty series."""
        return self.values[-1] if self.values else None

    @property
    def last_step(self) -> int | None:
        """The step of the last value."""
        return self.steps[-1] if self.steps else None

    @property
    def min(self) -> float | int | None:
        """The least number, NaN left out; None where there is no number."""
        return min(self._numbers(), default=None)

    @property
    def max(self) -> float | int | None:
        """The greatest number, NaN left out; None where there is no number."""
        return max(self._numbers(), default=None)

    def _numbers(self) -> list[float | int]:
        # By exact types, for True is an int to isinstance, and is no number here.
        return [value for value in self.values if type(value) in (int, float) and not math.isnan(value)]


def read(
    directory: Path,
    *,
    name: str | None = None,
    rank: int | Collection[int] | None = None,
    attempt: int | Collection[int] | None = None,
) -> dict[str, MetricSeries]:
    """Metric name -> series, of the metric logs in `directory`, in order of first appearance.

    name: this metric alone. rank: what this rank logged, or these. attempt: what this attempt logged, whole; of several
    attempts, and of all by default, the series that one would have logged that was never interrupted. Where one name was
    logged in different ways, the last way counts, as in `paceline.runs.metrics.read`.
    """
    found = placed_entries_by_name(directory, name=name, ranks=_several(rank), attempts=_several(attempt))
    return {metric: series_of(metric, entries) for metric, entries in found.items()}


def series_of(name: str, entries: list[dict[str, Any]]) -> MetricSeries:
    """The series of these lines of metric logs, each with its `rank` and `attempt`."""
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
    """A figure with axes for each metric that has numbers, a curve for each rank and attempt; by step, or where values have none
    by their number.

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
    # Not by pyplot, which would keep the figure, and might choose a window to draw it in.
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    figure.suptitle(_no_math(title))
    for number, (name, drawn) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for label, (steps, values) in drawn.items():
            # A single value is a point, which a line does not show.
            axes.plot(steps, values, marker="o" if len(values) == 1 else None, label=label)
        axes.set_title(_no_math(name), fontsize="medium")
        axes.grid(alpha=0.3)
        if len(drawn) > 1:
            axes.legend(fontsize="small")
    return figure


def _curves(one: MetricSeries) -> dict[str, tuple[list[float], list[float]]]:
    """Label -> steps and numbers, of each rank and attempt that has any."""
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
    # Between two of them matplotlib reads mathematics.
    return text.replace("$", r"\$")
