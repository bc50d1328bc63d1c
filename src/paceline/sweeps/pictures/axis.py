"""An axis: where a value lies on it, from 0 to 1, and its ticks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.sweeps.expressions import is_number

#: Of a metric: from this ratio of the largest to the smallest value on, linear steps would show the large ones alone.
_LOG_RATIO = 300
#: Ticks of numbers, about; more options of a choice than this many get no text each.
_TICKS = 5
_MOST_TEXTS = 24


@dataclass(frozen=True)
class Numbers:
    """From low to high, both finite and low below high. is_log: each power of ten takes as much room; low is above 0 then."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: Any) -> float | None:
        """From 0 to 1; None for what has no place: no finite number, or none above 0 on a logarithmic axis."""
        if not is_number(value) or (self.is_log and value <= 0):
            return None
        low, high, at = (self._scaled(number) for number in (self.low, self.high, value))
        return min(max((at - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """(place, text), from below."""
        numbers = self._powers() if self.is_log else self._steps()
        found = [(place, f"{number:.4g}") for number in numbers if (place := self.place(number)) is not None]
        # A narrow logarithmic axis may have no power of ten on it.
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
    """Options of a choice, by their texts, from below."""

    texts: tuple[str, ...]

    def place(self, value: Any) -> float | None:
        """From 0 to 1; None for what is none of the options."""
        text = text_of(value)
        if text not in self.texts:
            return None
        return (self.texts.index(text) + 0.5) / len(self.texts)

    def ticks(self) -> list[tuple[float, str]]:
        """(place, text), from below; some texts alone, of many."""
        apart = math.ceil(len(self.texts) / _MOST_TEXTS)
        return [((n + 0.5) / len(self.texts), text) for n, text in enumerate(self.texts) if n % apart == 0]


def axis_of(values: Iterable[Any], *, is_log: bool = False, options: Sequence[Any] | None = None) -> Numbers | Options:
    """The axis that holds these values. options: of a choice, which is what it is given out of."""
    found = list(values)
    if options is not None and len(options) <= _MOST_TEXTS:
        return Options(tuple(dict.fromkeys(map(text_of, [*options, *found]))))
    numbers = [value for value in found if is_number(value)]
    if len(numbers) < len(found):
        return Options(tuple(sorted({text_of(value) for value in found})))
    return numbers_axis(numbers, is_log=is_log)


def numbers_axis(numbers: Sequence[float], *, is_log: bool | None = None) -> Numbers:
    """The axis that holds these finite numbers. is_log: None for what suits them; False where one is not above 0."""
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    if is_log is None:
        is_log = low > 0 and high / low >= _LOG_RATIO
    is_log = is_log and low > 0
    if high <= low or not math.isfinite(high - low) or math.log10(high - low) < -300:
        # One value alone stands in the middle; the ends of the range of doubles are drawn without what lies between them.
        room = abs(low) / 2 or 0.5
        low, high = (low / 2, low * 2) if is_log else (max(low - room, -1e300), min(high + room, 1e300))
    return Numbers(low, high, is_log)


def text_of(value: Any) -> str:
    """A value as the pictures say it."""
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
