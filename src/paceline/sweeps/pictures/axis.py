"""Axes of pictures: places of values from 0 to 1, and ticks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.sweeps.expressions import is_number

#: Ratio of the largest to the smallest value from which a metric's axis is logarithmic.
_LOG_RATIO = 300
#: Approximate number of ticks, and the limit of texts for the options of a choice.
_TICKS = 5
_MOST_TEXTS = 24


@dataclass(frozen=True)
class Numbers:
    """An axis of numbers, linear or logarithmic.

    Attributes:
        low: Finite and below high; above 0 if is_log.
        is_log: Each power of ten takes the same space.
    """

    low: float
    high: float
    is_log: bool = False

    def place(self, value: Any) -> float | None:
        """Return the place from 0 to 1, or None if the value has none.

        Values that are not finite have no place, nor do values up to 0 on a logarithmic axis.
        """
        if not is_number(value) or (self.is_log and value <= 0):
            return None
        low, high, at = (self._scaled(number) for number in (self.low, self.high, value))
        return min(max((at - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (place, text) of each tick, in ascending order."""
        numbers = self._powers() if self.is_log else self._steps()
        found = [(place, f"{number:.4g}") for number in numbers if (place := self.place(number)) is not None]
        # A narrow logarithmic axis may hold no power of ten.
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
    """An axis of the options of a choice, by their texts, in ascending order."""

    texts: tuple[str, ...]

    def place(self, value: Any) -> float | None:
        """Return the place from 0 to 1, or None for other values."""
        text = text_of(value)
        if text not in self.texts:
            return None
        return (self.texts.index(text) + 0.5) / len(self.texts)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (place, text) of each tick. Some texts are skipped if there are many."""
        apart = math.ceil(len(self.texts) / _MOST_TEXTS)
        return [((n + 0.5) / len(self.texts), text) for n, text in enumerate(self.texts) if n % apart == 0]


def axis_of(values: Iterable[Any], *, is_log: bool = False, options: Sequence[Any] | None = None) -> Numbers | Options:
    """Return the axis for these values.

    `options` are those of a choice.
    """
    found = list(values)
    if options is not None and len(options) <= _MOST_TEXTS:
        return Options(tuple(dict.fromkeys(map(text_of, [*options, *found]))))
    numbers = [value for value in found if is_number(value)]
    if len(numbers) < len(found):
        return Options(tuple(sorted({text_of(value) for value in found})))
    return numbers_axis(numbers, is_log=is_log)


def numbers_axis(numbers: Sequence[float], *, is_log: bool | None = None) -> Numbers:
    """Return the axis for these finite numbers.

    By default, `is_log` is chosen by the range. It is False if a number is not above 0.
    """
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    if is_log is None:
        is_log = low > 0 and high / low >= _LOG_RATIO
    is_log = is_log and low > 0
    if high <= low or not math.isfinite(high - low) or math.log10(high - low) < -300:
        # A single value is in the middle. The range of doubles is clipped.
        room = abs(low) / 2 or 0.5
        low, high = (low / 2, low * 2) if is_log else (max(low - room, -1e300), min(high + room, 1e300))
    return Numbers(low, high, is_log)


def text_of(value: Any) -> str:
    """Return a value as text for pictures."""
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
