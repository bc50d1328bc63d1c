"""What is drawn of a sweep, and where: plain data, the same for every kind of picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.sweeps.expressions import Choice, Fixed, Normal, Uniform
from paceline.sweeps.pictures.axis import Numbers, Options, axis_of, numbers_axis, text_of
from paceline.sweeps.pictures.importance import Importance
from paceline.sweeps.space import Dimension, Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Goal, Trial, is_better, ranked

#: Trials that are drawn: the best ones. More lines than this can't be told from each other, and a browser is slow with them.
MOST = 1000


@dataclass(frozen=True)
class Column:
    """A hyperparameter or a metric: its name without dashes, and its axis."""

    name: str
    axis: Numbers | Options


@dataclass(frozen=True)
class Line:
    """A trial: its places on the columns (None where it has no value), and what is said of it.

    shade: from 0, the worst, to 1, the best; None without a value of the metric.
    """

    number: int
    status: str
    places: tuple[float | None, ...]
    texts: tuple[str, ...]
    shade: float | None


@dataclass(frozen=True)
class History:
    """A metric over the trials' numbers.

    points: (number, place, status). best: (number, place) of each trial that was the best up to then.
    """

    name: str
    axis: Numbers
    points: tuple[tuple[int, float, str], ...]
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """All pictures of a sweep.

    title: the sweep's id and how far it is. lines: of each trial, the worst first, so that the best are drawn over them.
    count: how many trials there are, of which `lines` may be some. importances: of each metric.
    remarks: what is not drawn, and why.
    """

    title: str
    count: int
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    histories: tuple[History, ...]
    importances: tuple[tuple[str, tuple[Importance, ...]], ...] = ()
    remarks: tuple[str, ...] = ()


def sketch(
    title: str,
    spec: SweepSpec,
    trials: Sequence[Trial],
    importances: Sequence[tuple[str, tuple[Importance, ...]]] = (),
    remarks: Sequence[str] = (),
) -> Sketch:
    """The pictures of these trials."""
    shown = ranked(trials, spec.goal)[:MOST]
    columns = (*_parameters(spec.space, shown), _metric(spec.metric, spec.goal, shown))
    valued = sum(trial.best(spec.goal) is not None for trial in shown)
    names = [column.name for column in columns[:-1]]
    lines = []
    for place, trial in enumerate(shown):
        plain = {name.lstrip("-"): value for name, value in trial.values.items()}
        value = trial.best(spec.goal)
        told = [plain.get(name) for name in names]
        has = [name in plain for name in names]
        places = [c.axis.place(v) if h else None for c, v, h in zip(columns, told, has, strict=False)]
        texts = [text_of(v) if h else "" for v, h in zip(told, has, strict=True)]
        lines.append(
            Line(
                number=trial.number,
                status=trial.status,
                places=(*places, columns[-1].axis.place(value)),
                texts=(*texts, "" if value is None else text_of(float(value))),
                shade=1 - place / max(1, valued - 1) if value is not None else None,
            )
        )
    history = _history(spec.metric, spec.goal, trials)
    if len(trials) > MOST:
        remarks = (*remarks, f"The best {MOST} of {len(trials)} trials are drawn.")
    return Sketch(
        title=title,
        count=len(trials),
        columns=columns,
        lines=tuple(reversed(lines)),
        histories=(history,) if history else (),
        importances=tuple(importances),
        remarks=tuple(remarks),
    )


def _parameters(space: Space, trials: Sequence[Trial]) -> list[Column]:
    """A column for each name that has more than one value, or that not all trials have."""
    found: dict[str, list[Dimension]] = {}
    for dimension in _all(space.dimensions):
        # What a choice of spaces chose is seen in the names that are there.
        if not dimension.branches:
            found.setdefault(dimension.name.lstrip("-"), []).append(dimension)
    columns = []
    for name, dimensions in found.items():
        values = [v for trial in trials for key, v in trial.values.items() if key.lstrip("-") == name]
        options = _options(dimensions)
        # A constant tells nothing apart.
        if options is not None and len(options) == 1 and len(values) == len(trials):
            continue
        is_log = all(_is_log(dimension) for dimension in dimensions)
        columns.append(Column(name, axis_of(values, is_log=is_log, options=options)))
    return columns


def _metric(name: str, goal: Goal, trials: Sequence[Trial]) -> Column:
    return Column(name, numbers_axis([value for trial in trials if (value := trial.best(goal)) is not None]))


def _history(name: str, goal: Goal, trials: Sequence[Trial]) -> History | None:
    valued = [(trial, value) for trial in trials if (value := trial.best(goal)) is not None]
    if not valued:
        return None
    axis = numbers_axis([value for _, value in valued])
    best: list[tuple[Trial, float]] = []
    for trial, value in valued:
        if not best or is_better(value, best[-1][1], goal):
            best.append((trial, value))
    # Of many trials every so many-th is drawn: a picture is a few hundred points wide.
    apart = -(-len(valued) // (2 * MOST))
    return History(
        name=name,
        axis=axis,
        points=tuple((trial.number, axis.place(value) or 0.0, trial.status) for trial, value in valued[::apart]),
        best=tuple((trial.number, axis.place(value) or 0.0) for trial, value in best),
    )


def _all(dimensions: Sequence[Dimension]) -> list[Dimension]:
    return [d for dimension in dimensions for d in (dimension, *(i for b in dimension.branches for i in _all(b)))]


def _options(dimensions: Sequence[Dimension]) -> list[Any] | None:
    """What the choices of these dimensions are out of; None where one is no choice."""
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
