"""Group runs by the value of a field, with means and deviations of numeric fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.runs.search.facts import RunFacts
from paceline.runs.search.fields import FieldValue, RunField, cell_text, field_of
from paceline.runs.search.summaries import as_float
from paceline.system.units import value_text

_NUMBERS = ("number", "duration", "any")


@dataclass(frozen=True, slots=True)
class MeanSpread:
    """The mean and deviation of `count` numbers, such as a metric over several runs.

    `deviation` is the sample standard deviation (n - 1). It is None for one number, or if a number is infinite.
    """

    mean: float
    deviation: float | None
    count: int

    def __str__(self) -> str:
        return self.text()

    def text(self, shown: Callable[[float], str] = value_text) -> str:
        """Return mean, deviation and count as text: "0.6 ± 0.141 (2)". `shown` formats a number."""
        deviation = "" if self.deviation is None else f" ± {shown(float(f'{self.deviation:.3g}'))}"
        return f"{shown(self.mean)}{deviation} ({self.count})"


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs with an equal value of a field; `text` shows the value."""

    value: FieldValue
    text: str
    runs: list[RunFacts]

    def spread(self, of: RunField) -> MeanSpread | None:
        """Return a numeric field's mean and deviation over the runs; None without numbers."""
        return spread(map(of.get, self.runs)) if of.kind in _NUMBERS else None

    def common(self, of: RunField) -> FieldValue:
        """Return the field's value if all runs of the group have it, or None."""
        first = of.get(self.runs[0])
        return first if all(of.get(facts) == first for facts in self.runs) else None


def spread(values: Iterable[FieldValue]) -> MeanSpread | None:
    """Return the numbers' mean and deviation; None without numbers or with texts.

    Missing values and NaN do not count.

    Examples:
        >>> spread([0.5, None, 0.7, float("nan")])
        MeanSpread(mean=0.6, deviation=0.14142135623730948, count=2)
    """
    given = [value for value in values if value not in (None, "")]
    # Drop NaN, for which `value == value` is False.
    numbers = [as_float(value) for value in given if not isinstance(value, str) and value == value]  # noqa: PLR0124
    if not numbers or any(isinstance(value, str) for value in given):
        return None
    if not all(map(math.isfinite, numbers)):
        # Use `sum`, because fsum raises an error if the numbers include both infinities. `sum` then returns NaN.
        return MeanSpread(sum(numbers) / len(numbers), None, len(numbers))
    mean = math.fsum(number / len(numbers) for number in numbers)
    if len(numbers) == 1:
        return MeanSpread(mean, None, 1)
    # Use hypot, which does not overflow when it squares large numbers.
    return MeanSpread(
        mean, math.hypot(*(number - mean for number in numbers)) / math.sqrt(len(numbers) - 1), len(numbers)
    )


def grouped(runs: Sequence[RunFacts], by: RunField, sort: str = "") -> list[RunGroup]:
    """Return the runs grouped by a field. Runs without a value come last.

    Args:
        runs: The runs. A group keeps their order.
        by: The field. Runs with the number 1 and runs with the text "1" are one group.
        sort: The field by which the caller has sorted the runs. If the field is numeric, its mean sorts the groups. If
            not, the groups have the order of their first runs.

    Examples:
        >>> [(group.text, len(group.runs)) for group in grouped(runs, field_of("experiment"))]
        [('digits', 2)]
    """
    found: dict[str, RunGroup] = {}
    for facts in runs:
        text = cell_text(facts, by)
        found.setdefault(text, RunGroup(by.get(facts), text, [])).runs.append(facts)
    groups = sorted(found.values(), key=lambda group: group.value in (None, ""))
    if not sort:
        return groups
    order = field_of(sort.removeprefix("-"))
    means = {
        group.text: one.mean for group in groups if (one := group.spread(order)) is not None and one.mean == one.mean
    }
    is_descending = order.is_descending(groups[0].runs[0]) if groups else False
    known = [group for group in groups if group.text in means]
    known.sort(key=lambda group: means[group.text], reverse=is_descending != sort.startswith("-"))
    return known + [group for group in groups if group.text not in means]
