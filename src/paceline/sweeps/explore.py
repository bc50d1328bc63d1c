"""A point a little beside another: how population-based training explores (Jaderberg et al., 2017, section 3).

| expression | what becomes of a value |
|---|---|
| a range above 0, a lognormal | times a factor, within the range; an integer or a quantised one moves by a step at least |
| a range that goes below 0 | moved by (factor - 1) of half its width |
| a normal | moved by (factor - 1) standard deviations |
| a choice of numbers in order | the next or the former option |
| any other choice | another option |
| a choice of spaces | the same branch: a checkpoint fits the branch that made it; inside of it as above |
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from paceline.sweeps.expressions import Choice, Fixed, Integers, Normal, Raw, Uniform, is_number
from paceline.sweeps.space import Dimension, Space


def explored(
    space: Space,
    chosen: Mapping[str, Raw],
    source: random.Random,
    *,
    factors: Sequence[float] = (0.8, 1.2),
    resample: float = 0.25,
    mutate: Sequence[str] | None = None,
) -> dict[str, Raw]:
    """Key -> raw value of a point beside `chosen`.

    factors: one of them for each hyperparameter, each as likely. resample: how likely one is drawn from the space anew instead.
    mutate: names, with or without dashes, of those that change; None for all.
    """
    names = None if mutate is None else {name.lstrip("-") for name in mutate}

    def choose(dimension: Dimension) -> Raw:
        # Drawn for each hyperparameter whether it changes or not: what is drawn for one does not hang on the others' names.
        anew, factor, quantile = source.random(), source.choice(list(factors)), source.random()
        raw, expression = chosen[dimension.key], dimension.expression
        is_kept = names is not None and dimension.name.lstrip("-") not in names
        if is_kept or dimension.branches or isinstance(expression, Fixed):
            return raw
        return expression.raw_at(quantile) if anew < resample else _moved(expression, raw, factor, quantile)

    return space.draw(choose)


def _moved(expression: object, raw: Raw, factor: float, quantile: float) -> Raw:
    if isinstance(expression, Choice):
        return _other(expression, int(raw), factor, quantile)
    if isinstance(expression, Integers):
        whole = round(raw * factor) if expression.low >= 0 else round(raw + (factor - 1) * expression.count / 2)
        return min(max(whole if whole != raw else int(raw) + _sign(factor), expression.low), expression.high - 1)
    if isinstance(expression, Normal):
        value = expression.value(raw)
        beside = value * factor if expression.is_log else value + (factor - 1) * expression.sigma
        if expression.q and expression.value(expression.raw(beside)) == value:
            beside = value + _sign(factor) * expression.q
        # A lognormal has nothing at 0 and below, where a quantised one may be rounded to.
        return raw if expression.is_log and beside <= 0 else expression.raw(beside)
    assert isinstance(expression, Uniform)
    half = (expression.high - expression.low) / 2
    moved = raw * factor if expression.low >= 0 else raw + (factor - 1) * half
    moved = min(max(moved, expression.low), expression.high)
    if expression.q and expression.value(moved) == expression.value(raw):
        moved = min(max(raw + _sign(factor) * expression.q, expression.low), expression.high)
    return moved


def _other(expression: Choice, index: int, factor: float, quantile: float) -> int:
    options = expression.options
    if len(options) == 1:
        return index
    if all(map(is_number, options)) and list(options) in (sorted(options), sorted(options, reverse=True)):
        step = _sign(factor) if options[0] <= options[-1] else -_sign(factor)
        return min(max(index + step, 0), len(options) - 1)
    # The one that it has is passed over.
    other = min(int(quantile * (len(options) - 1)), len(options) - 2)
    return other + (other >= index)


def _sign(factor: float) -> int:
    return 1 if factor >= 1 else -1
