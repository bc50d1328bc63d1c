"""Pictures of any runs, drawn like a sweep's pictures.

The runs stand for the trials of a sweep, and their arguments for its space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.errors import SweepError
from paceline.sweeps.expressions import Choice, Expression, Uniform, is_number
from paceline.sweeps.pictures.draw import sketched as sketch_of
from paceline.sweeps.pictures.figure_data import Column, Front, Sketch, axis_of, text_of
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Goal, Trial
from paceline.system.units import is_number_text

#: Maximum number of parameters to draw, because more axes are hard to read.
_MOST = 24
#: Ratio of the largest to the smallest value from which a parameter's axis is logarithmic.
_LOG_RATIO = 30


def sketched(
    parameters: Mapping[str, Sequence[object]],
    metric: str,
    results: Sequence[object],
    statuses: Sequence[str],
    goal: Goal = "maximize",
) -> Sketch | None:
    """Return the data of runs' figures; None without parameters or values of the metric.

    Args:
        parameters: Name of a parameter -> its value in each run; None if a run lacks the parameter.
        metric: The metric's name.
        results: The metric's value in each run, or None.
        statuses: Each run's state.
        goal: Whether a larger ("maximize") or a smaller value of the metric is better.
    """
    columns: dict[str, tuple[Expression, list[object]]] = {}
    for name, values in parameters.items():
        # A search space allows no blanks, `=` or leading dashes in names. Skip a name that becomes equal to an earlier one.
        plain = "_".join(name.replace("=", "_").replace("\0", "_").split()).lstrip("-")
        if plain and plain not in columns and len(columns) < _MOST:
            read = _read(values)
            columns[plain] = (_expression(read), read)
    numbers = [float(value) if is_number(value) else None for value in results]
    if not columns or not metric or not any(number is not None for number in numbers):
        return None
    try:
        spec = SweepSpec(space=Space({name: of for name, (of, _) in columns.items()}), metric=metric, goal=goal)
    except SweepError:
        # Draw nothing, because the name of a parameter is not allowed in a search space.
        return None
    trials = []
    for number, (result, status) in enumerate(zip(numbers, statuses, strict=True)):
        point = {name: column[number] for name, (_, column) in columns.items()}
        curve = () if result is None else (result,)
        chosen = spec.space.chosen(point)
        trials.append(Trial(number=number, run_id="", chosen=chosen, values=point, status=status, curve=curve))
    return sketch_of("", spec, trials)


def scatter(x: str, xs: Sequence[object], y: str, ys: Sequence[object]) -> Front:
    """Return a scatter plot of `ys` over `xs`, a point per run.

    x, y: Names of the axes. A run in which one of the values is None has no point.
    """
    # Skip runs without x or y. They have no point, and their other value may be a text, which would make a numeric axis textual.
    both = [number for number, pair in enumerate(zip(xs, ys, strict=True)) if None not in pair] or [*range(len(xs))]
    across, up = _read([xs[number] for number in both]), _read([ys[number] for number in both])
    columns = Column(x, axis_of(across, is_log=_is_log(across))), Column(y, axis_of(up, is_log=_is_log(up)))
    points = []
    for number, pair in zip(both, zip(across, up, strict=True), strict=True):
        left, bottom = (column.axis.place(value) for column, value in zip(columns, pair, strict=True))
        if left is not None and bottom is not None and None not in (xs[number], ys[number]):
            points.append((number, (left, bottom), "Completed"))
    return Front(*columns, tuple(points), ())


def _read(values: Sequence[object]) -> list[object]:
    read = [float(value) if isinstance(value, str) and is_number_text(value) else value for value in values]
    # An axis of numbers has no place for a missing value, so convert all values to texts.
    if all(is_number(value) for value in read):
        return read
    return ["–" if value is None else text_of(value) for value in values]


def _is_log(values: Sequence[object]) -> bool:
    numbers = [float(value) for value in values if is_number(value)]
    return len(numbers) == len(values) and min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_RATIO


def _expression(values: Sequence[object]) -> Expression:
    numbers = [float(value) for value in values if is_number(value)]
    if len(numbers) < len(values) or min(numbers) == max(numbers):
        return Choice(tuple(dict.fromkeys(values)))
    return Uniform(min(numbers), max(numbers), is_log=_is_log(values))
