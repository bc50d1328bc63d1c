"""Data of a sweep's figures: marks and lines with positions from 0 to 1, for any file format."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.runs import states
from paceline.sweeps.expressions import Choice, Fixed, Normal, Uniform, is_number
from paceline.sweeps.pictures.importance import Importance
from paceline.sweeps.results import best_trials, values_of
from paceline.sweeps.space import Dimension, Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Goal, Trial, is_better, ordered

#: Maximum number of trials to draw: the best trials. More lines are hard to tell apart, and slow in a browser.
MOST = 1000

#: Colours from the worst trial to the best: readable on white, and distinct for colour-blind readers.
_SHADES = ((0xC9, 0xD3, 0xDF), (0x7F, 0xBF, 0xC9), (0x2C, 0x7F, 0xB8), (0x1B, 0x2A, 0x7A))
FAILED = "#d62728"
BEST = "#1b2a7a"
GREY = "#8a8f98"

#: Ratio of the largest to the smallest value from which a metric's axis is logarithmic.
_LOG_RATIO = 300
#: Approximate number of ticks on an axis of numbers.
_TICKS = 5
_MOST_TEXTS = 24  # maximum number of ticks for the options of a choice
#: Maximum number of slices: plots of the metric over one hyperparameter.
_MOST_SLICES = 12


@dataclass(frozen=True)
class Column:
    """A hyperparameter or metric with its axis, in figures of trials."""

    name: str
    axis: Numbers | Options


@dataclass(frozen=True)
class Line:
    """A trial in the parallel coordinates and in the table.

    Attributes:
        places: The trial's position on each column from 0 to 1, or None without a value.
        texts: The trial's value in each column, as text.
        shade: The rank of the trial's metric from 0 (worst) to 1 (best); None without a value of the metric.
    """

    number: int
    status: str
    places: tuple[float | None, ...]
    texts: tuple[str, ...]
    shade: float | None


@dataclass(frozen=True)
class History:
    """A chart of the trials' metric values over their numbers.

    Attributes:
        points: (trial number, position on the axis of the metric, status) of each trial.
        best: (trial number, position on the axis) of each trial that was better than all earlier trials.
    """

    name: str
    axis: Numbers
    points: tuple[tuple[int, float, str], ...]
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Front:
    """A scatter plot of two metrics with the Pareto front.

    Attributes:
        points: (number, positions on both axes, status) of each trial.
        best: Positions on both axes of the trials on the Pareto front, from left to right.
    """

    across: Column
    up: Column
    points: tuple[tuple[int, tuple[float, float], str], ...]
    best: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """The data of all figures of a sweep.

    Attributes:
        title: The sweep's id and progress.
        lines: Trials, the worst first, so that the best trials are drawn on top.
        count: Number of all trials; `lines` may hold fewer trials.
        fronts: One figure for each pair of metrics that follow each other in the sweep's list.
        slices: The primary metric over each hyperparameter.
        importances: The importance of hyperparameters for each metric.
        remarks: Sentences that say which figures are not drawn, and why.
    """

    title: str
    count: int
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    histories: tuple[History, ...]
    fronts: tuple[Front, ...] = ()
    slices: tuple[Front, ...] = ()
    importances: tuple[tuple[str, tuple[Importance, ...]], ...] = ()
    remarks: tuple[str, ...] = ()


def sketch(
    title: str,
    spec: SweepSpec,
    trials: Sequence[Trial],
    importances: Sequence[tuple[str, tuple[Importance, ...]]] = (),
    remarks: Sequence[str] = (),
) -> Sketch:
    """Return the data of all figures of a sweep, from these trials."""
    shown = ordered(trials, spec.goals)[:MOST]
    parameters = _parameters(spec.space, shown)
    values = {trial.number: _values(trial, spec) for trial in trials}
    metrics = [
        Column(name, numbers_axis([v for trial in shown if (v := values[trial.number][n]) is not None]))
        for n, name in enumerate(spec.metrics)
    ]
    valued = sum(values[trial.number][0] is not None for trial in shown)
    best = {trial.number for trial in best_trials(trials, spec)}
    lines = []
    for place, trial in enumerate(shown):
        plain = {name.lstrip("-"): value for name, value in trial.values.items()}
        results = values[trial.number]
        # All trials on the Pareto front get the best color.
        rank = 0 if trial.number in best else place
        lines.append(
            Line(
                number=trial.number,
                status=trial.shown,
                places=(
                    *(column.axis.place(plain[column.name]) if column.name in plain else None for column in parameters),
                    *(column.axis.place(value) for column, value in zip(metrics, results, strict=True)),
                ),
                texts=(
                    *(text_of(plain[column.name]) if column.name in plain else "" for column in parameters),
                    *("" if value is None else text_of(float(value)) for value in results),
                ),
                shade=1 - rank / max(1, valued - 1) if results[0] is not None else None,
            )
        )
    histories = [
        _history(name, goal, [(trial, v) for trial in trials if (v := values[trial.number][n]) is not None])
        for n, (name, goal) in enumerate(zip(spec.metrics, spec.goals, strict=True))
    ]
    columns = (*parameters, *metrics)
    if len(trials) > MOST:
        remarks = (*remarks, f"The best {MOST} of {len(trials)} trials are drawn.")
    return Sketch(
        title=title,
        count=len(trials),
        columns=columns,
        lines=tuple(reversed(lines)),
        histories=tuple(history for history in histories if history is not None),
        slices=tuple(_slice(columns, n, len(parameters), lines) for n in range(min(len(parameters), _MOST_SLICES))),
        fronts=tuple(_front(pair, n, shown, values, best) for n, pair in enumerate(itertools.pairwise(metrics))),
        importances=tuple(importances),
        remarks=tuple(remarks),
    )


def _parameters(space: Space, trials: Sequence[Trial]) -> list[Column]:
    dimensions_by_name: dict[str, list[Dimension]] = {}
    # Skip a choice between branches: the parameters that a trial has show its branch.
    for dimension in space.parameters:
        dimensions_by_name.setdefault(dimension.name.lstrip("-"), []).append(dimension)
    columns = []
    for name, dimensions in dimensions_by_name.items():
        values = [v for trial in trials for key, v in trial.values.items() if key.lstrip("-") == name]
        options = _options(dimensions)
        # Skip a parameter that is constant, because its axis would show nothing.
        if options is not None and len(options) == 1 and len(values) == len(trials):
            continue
        is_log = all(_is_log(dimension) for dimension in dimensions)
        columns.append(Column(name, axis_of(values, is_log=is_log, options=options)))
    return columns


def _values(trial: Trial, spec: SweepSpec) -> tuple[float | None, ...]:
    results = [value if value is not None and math.isfinite(value) else None for value in values_of(trial, spec)]
    # A new trial has no curves, and so no results. Add None for each metric without a result.
    return (*results, *(None for _ in range(len(spec.metrics) - len(results))))


def _front(
    pair: tuple[Column, Column],
    first: int,
    trials: Sequence[Trial],
    values: Mapping[int, tuple[float | None, ...]],
    best: Collection[int],
) -> Front:
    points = []
    for trial in trials:
        x, y = (c.axis.place(v) for c, v in zip(pair, values[trial.number][first : first + 2], strict=True))
        if x is not None and y is not None:
            points.append((trial.number, (x, y), trial.shown))
    return Front(*pair, tuple(points), tuple(sorted(places for number, places, _ in points if number in best)))


def _slice(columns: Sequence[Column], across: int, up: int, lines: Sequence[Line]) -> Front:
    points = []
    for line in lines:
        x, y = line.places[across], line.places[up]
        if x is not None and y is not None:
            points.append((line.number, (x, y), line.status))
    return Front(columns[across], columns[up], tuple(points), ())


def _history(name: str, goal: Goal, valued: Sequence[tuple[Trial, float]]) -> History | None:
    if not valued:
        return None
    axis = numbers_axis([value for _, value in valued])
    best: list[tuple[Trial, float]] = []
    for trial, value in valued:
        if not best or is_better(value, best[-1][1], goal):
            best.append((trial, value))
    # Draw only some of many trials, because a picture is only a few hundred pixels wide.
    apart = -(-len(valued) // (2 * MOST))
    return History(
        name=name,
        axis=axis,
        points=tuple((trial.number, axis.place(value) or 0.0, trial.shown) for trial, value in valued[::apart]),
        best=tuple((trial.number, axis.place(value) or 0.0) for trial, value in best),
    )


def _options(dimensions: Sequence[Dimension]) -> list[object] | None:
    options: list[object] = []
    for dimension in dimensions:
        expression = dimension.expression
        if isinstance(expression, Choice):
            options += expression.options
        elif isinstance(expression, Fixed):
            options.append(expression.value(0))
        else:
            return None
    return options


def _is_log(dimension: Dimension) -> bool:
    return isinstance(dimension.expression, (Uniform, Normal)) and dimension.expression.is_log


def shade(place: float | None) -> str:
    """Return a metric's colour by position from 0 (worst) to 1 (best); grey for None."""
    if place is None:
        return GREY
    at = min(max(place, 0.0), 1.0) * (len(_SHADES) - 1)
    first = min(int(at), len(_SHADES) - 2)
    pairs = zip(_SHADES[first], _SHADES[first + 1], strict=True)
    return "#" + "".join(f"{round(low + (high - low) * (at - first)):02x}" for low, high in pairs)


def line_of(status: str, place: float | None) -> tuple[str, str]:
    """Return a trial's colour and SVG dash pattern, by status and metric."""
    if status == states.FAILED:
        return FAILED, "3 3"
    return shade(place), "" if status == states.COMPLETED else "7 4"


@dataclass(frozen=True)
class Numbers:
    """An axis of numbers in a figure, linear or logarithmic.

    Attributes:
        low, high: The ends of the axis, the smaller number first. Both are above 0 if `is_log`.
        is_log: Whether the axis is logarithmic.
    """

    low: float
    high: float
    is_log: bool = False

    def place(self, value: object) -> float | None:
        """Return the value's position on the axis from 0 to 1, or None.

        Values that are not finite numbers have no position, nor have 0 and negative values on a logarithmic axis.
        """
        if not is_number(value) or (self.is_log and value <= 0):
            return None
        low, high, at = (self._scaled(number) for number in (self.low, self.high, value))
        return min(max((at - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (position, text) of each tick, in ascending order."""
        numbers = self._powers() if self.is_log else self._steps()
        found = [(place, f"{number:.4g}") for number in numbers if (place := self.place(number)) is not None]
        # Label the ends of a narrow logarithmic axis, which may hold no power of ten.
        return found if len(found) > 1 else [(0.0, f"{self.low:.3g}"), (1.0, f"{self.high:.3g}")]

    def _scaled(self, number: float) -> float:
        return math.log10(number) if self.is_log else float(number)

    def _steps(self) -> list[float]:
        rough = (self.high - self.low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _powers(self) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        apart = max(1, math.ceil((last - first) / (2 * _TICKS)))
        numbers = [10.0**power for power in range(first, last + 1, apart)]
        if len(numbers) > 2:
            return numbers
        between = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
        return [number for number in between if self.low <= number <= self.high]


@dataclass(frozen=True)
class Options:
    """An axis of a choice's options in a figure, sorted by text."""

    texts: tuple[str, ...]

    def place(self, value: object) -> float | None:
        """Return an option's position on the axis (0 to 1); None if unknown."""
        text = text_of(value)
        if text not in self.texts:
            return None
        return (self.texts.index(text) + 0.5) / len(self.texts)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (position, text) of each tick. With many options, only some have ticks."""
        apart = math.ceil(len(self.texts) / _MOST_TEXTS)
        return [((n + 0.5) / len(self.texts), text) for n, text in enumerate(self.texts) if n % apart == 0]


def axis_of(
    values: Iterable[object], *, is_log: bool = False, options: Sequence[object] | None = None
) -> Numbers | Options:
    """Return an axis for a hyperparameter's or metric's values, or a choice's `options`."""
    listed = list(values)
    if options is not None and len(options) <= _MOST_TEXTS:
        return Options(tuple(dict.fromkeys(map(text_of, [*options, *listed]))))
    numbers = [value for value in listed if is_number(value)]
    if len(numbers) < len(listed):
        return Options(tuple(sorted({text_of(value) for value in listed})))
    return numbers_axis(numbers, is_log=is_log)


def numbers_axis(numbers: Sequence[float], *, is_log: bool | None = None) -> Numbers:
    """Return the axis for these finite numbers.

    By default, a wide range gets a logarithmic axis. The axis is always linear if a number is 0 or negative.
    """
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    if is_log is None:
        is_log = low > 0 and high / low >= _LOG_RATIO
    is_log = is_log and low > 0
    if high <= low or not math.isfinite(high - low) or math.log10(high - low) < -300:
        # With a single value, widen the axis around it, within the range of doubles.
        room = abs(low) / 2 or 0.5
        low, high = (low / 2, low * 2) if is_log else (max(low - room, -1e300), min(high + room, 1e300))
    return Numbers(low, high, is_log)


def text_of(value: object) -> str:
    """Return a hyperparameter's or metric's value as text for pictures."""
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
