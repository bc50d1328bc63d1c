"""Data of a sweep's figures: marks, lines and places, for any file format."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.runs import states
from paceline.sweeps.expressions import Choice, Fixed, Normal, Uniform
from paceline.sweeps.pictures.axis import Numbers, Options, axis_of, numbers_axis, text_of
from paceline.sweeps.pictures.importance import Importance
from paceline.sweeps.results import best_trials, values_of
from paceline.sweeps.space import Dimension, Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Goal, Trial, is_better, ordered

#: Limit of trials to draw, the best ones. More lines are hard to tell apart and slow in a browser.
MOST = 1000

#: Colours from the worst trial to the best: readable on white, and in order for the colour-blind.
_SHADES = ((0xC9, 0xD3, 0xDF), (0x7F, 0xBF, 0xC9), (0x2C, 0x7F, 0xB8), (0x1B, 0x2A, 0x7A))
FAILED = "#d62728"
BEST = "#1b2a7a"
GREY = "#8a8f98"


@dataclass(frozen=True)
class Column:
    """The axis of a hyperparameter or a metric, with its name without dashes."""

    name: str
    axis: Numbers | Options


@dataclass(frozen=True)
class Line:
    """A trial in the parallel coordinates and in the table.

    Attributes:
        places: Its place on each column, or None.
        texts: Its text in each column.
        shade: From 0, the worst, to 1, the best; None without a value of the metric.
    """

    number: int
    status: str
    places: tuple[float | None, ...]
    texts: tuple[str, ...]
    shade: float | None


@dataclass(frozen=True)
class History:
    """A metric over the trials' numbers.

    Attributes:
        points: (number, place, status) of each trial.
        best: (number, place) of each trial that was the best so far.
    """

    name: str
    axis: Numbers
    points: tuple[tuple[int, float, str], ...]
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Front:
    """Two metrics against each other.

    Attributes:
        points: (number, places, status) of each trial.
        best: Places of the Pareto front, from left to right.
    """

    across: Column
    up: Column
    points: tuple[tuple[int, tuple[float, float], str], ...]
    best: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """All figures of a sweep.

    Attributes:
        title: The sweep's id and progress.
        lines: Trials, the worst first, so that the best are drawn on top.
        count: Number of all trials; `lines` may hold fewer.
        fronts: For each pair of neighbouring metrics.
        importances: For each metric.
        remarks: Parts that are not drawn, and why.
    """

    title: str
    count: int
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    histories: tuple[History, ...]
    fronts: tuple[Front, ...] = ()
    importances: tuple[tuple[str, tuple[Importance, ...]], ...] = ()
    remarks: tuple[str, ...] = ()


def sketch(
    title: str,
    spec: SweepSpec,
    trials: Sequence[Trial],
    importances: Sequence[tuple[str, tuple[Importance, ...]]] = (),
    remarks: Sequence[str] = (),
) -> Sketch:
    """Return the figures of these trials."""
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
        found = values[trial.number]
        # All trials on the front rank first.
        rank = 0 if trial.number in best else place
        lines.append(
            Line(
                number=trial.number,
                status=trial.shown,
                places=(
                    *(column.axis.place(plain[column.name]) if column.name in plain else None for column in parameters),
                    *(column.axis.place(value) for column, value in zip(metrics, found, strict=True)),
                ),
                texts=(
                    *(text_of(plain[column.name]) if column.name in plain else "" for column in parameters),
                    *("" if value is None else text_of(float(value)) for value in found),
                ),
                shade=1 - rank / max(1, valued - 1) if found[0] is not None else None,
            )
        )
    histories = [
        _history(name, goal, [(trial, v) for trial in trials if (v := values[trial.number][n]) is not None])
        for n, (name, goal) in enumerate(zip(spec.metrics, spec.goals, strict=True))
    ]
    if len(trials) > MOST:
        remarks = (*remarks, f"The best {MOST} of {len(trials)} trials are drawn.")
    return Sketch(
        title=title,
        count=len(trials),
        columns=(*parameters, *metrics),
        lines=tuple(reversed(lines)),
        histories=tuple(history for history in histories if history is not None),
        fronts=tuple(_front(pair, n, shown, values, best) for n, pair in enumerate(itertools.pairwise(metrics))),
        importances=tuple(importances),
        remarks=tuple(remarks),
    )


def _parameters(space: Space, trials: Sequence[Trial]) -> list[Column]:
    """Return a column for each name with several values, or that some trials lack."""
    found: dict[str, list[Dimension]] = {}
    # Names show which branch was chosen.
    for dimension in space.parameters:
        found.setdefault(dimension.name.lstrip("-"), []).append(dimension)
    columns = []
    for name, dimensions in found.items():
        values = [v for trial in trials for key, v in trial.values.items() if key.lstrip("-") == name]
        options = _options(dimensions)
        # A constant shows nothing.
        if options is not None and len(options) == 1 and len(values) == len(trials):
            continue
        is_log = all(_is_log(dimension) for dimension in dimensions)
        columns.append(Column(name, axis_of(values, is_log=is_log, options=options)))
    return columns


def _values(trial: Trial, spec: SweepSpec) -> tuple[float | None, ...]:
    """Return a trial's result in each metric; None where it is not finite."""
    found = [value if value is not None and math.isfinite(value) else None for value in values_of(trial, spec)]
    # A new trial has no curves yet.
    return (*found, *(None for _ in range(len(spec.metrics) - len(found))))


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


def _history(name: str, goal: Goal, valued: Sequence[tuple[Trial, float]]) -> History | None:
    if not valued:
        return None
    axis = numbers_axis([value for _, value in valued])
    best: list[tuple[Trial, float]] = []
    for trial, value in valued:
        if not best or is_better(value, best[-1][1], goal):
            best.append((trial, value))
    # Thin out many trials: a picture is a few hundred points wide.
    apart = -(-len(valued) // (2 * MOST))
    return History(
        name=name,
        axis=axis,
        points=tuple((trial.number, axis.place(value) or 0.0, trial.shown) for trial, value in valued[::apart]),
        best=tuple((trial.number, axis.place(value) or 0.0) for trial, value in best),
    )


def _options(dimensions: Sequence[Dimension]) -> list[Any] | None:
    """Return all options of these dimensions, or None if one is no choice."""
    found: list[Any] = []
    for dimension in dimensions:
        expression = dimension.expression
        if isinstance(expression, Choice):
            found += expression.options
        elif isinstance(expression, Fixed):
            found.append(expression.value(0))
        else:
            return None
    return found


def _is_log(dimension: Dimension) -> bool:
    return isinstance(dimension.expression, (Uniform, Normal)) and dimension.expression.is_log


def shade(place: float | None) -> str:
    """Return the colour of a place from 0, the worst, to 1, the best; None is grey."""
    if place is None:
        return GREY
    at = min(max(place, 0.0), 1.0) * (len(_SHADES) - 1)
    first = min(int(at), len(_SHADES) - 2)
    pairs = zip(_SHADES[first], _SHADES[first + 1], strict=True)
    return "#" + "".join(f"{round(low + (high - low) * (at - first)):02x}" for low, high in pairs)


def line_of(status: str, place: float | None) -> tuple[str, str]:
    """Return colour and SVG dashes of a trial's line. No dashes are a solid line."""
    if status == states.FAILED:
        return FAILED, "3 3"
    return shade(place), "" if status == states.COMPLETED else "7 4"
