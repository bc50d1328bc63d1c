"""The expressions of a search space: the values that a hyperparameter may take.

Each expression has a value for the script and a raw value for samplers and records. These differ in three cases. For a
choice, the raw value is the option's index, because an option may be any JSON. For a normal distribution, it is the
quantile, because samplers need bounded ranges. For a quantized range, it is the value before rounding.

Expressions are defined as in the Azure SDK and Hyperopt, except that the bounds of `loguniform` are plain values, not
logarithms. `qX(..., q)` is `round(x / q) * q`, which may exceed the bounds by up to q / 2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard, runtime_checkable

from paceline.errors import SweepError
from paceline.runs.search.summaries import as_float
from paceline.system.names import did_you_mean

Raw: TypeAlias = "int | float"

#: Minimum distance of a quantile from 0 and 1, where the value of a normal distribution is infinite.
_TAIL = 1e-9


@runtime_checkable
class Expression(Protocol):
    """A distribution of a hyperparameter's values."""

    @property
    def count(self) -> int | None:
        """The number of different values, or None for a continuous range."""

    def raw_at(self, quantile: float) -> Raw:
        """Return the raw value, as samplers use it, at a quantile in [0, 1)."""

    def value(self, raw: Raw) -> object:
        """Convert a sampler's raw value to the value that the script gets."""

    def raw(self, value: object) -> Raw:
        """Convert a value that the script gets to the sampler's raw value.

        Raises:
            SweepError: The expression does not have this value.
        """

    def to_json(self) -> list[object]:
        """Return the expression as `[name, arguments]`, the Azure SDK's format."""


@dataclass(frozen=True)
class Choice:
    """A choice of options: any JSON values, or mappings that are spaces."""

    options: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.options:
            raise SweepError("choice() has no options. Give at least one: choice(32, 64).")
        spaces = [isinstance(option, Mapping) for option in self.options]
        if any(spaces) and not all(spaces):
            raise SweepError(
                "choice(): some options are spaces (mappings) and some are values. Make each a mapping; "
                "one without parameters of its own is {}."
            )
        if not any(spaces):
            for option in self.options:
                _check_json(option)

    @property
    def is_of_spaces(self) -> bool:
        return isinstance(self.options[0], Mapping)

    @property
    def count(self) -> int:
        return len(self.options)

    def raw_at(self, quantile: float) -> int:
        # Limit the index, because the quantile 1 would give an index after the last option.
        return min(int(quantile * len(self.options)), len(self.options) - 1)

    def value(self, raw: Raw) -> object:
        return self.options[int(raw)]

    def raw(self, value: object) -> int:
        for index, option in enumerate(self.options):
            # Distinguish bool from int: 1 == True in Python, but choice(1, True) has two options.
            if option == value and isinstance(option, bool) == isinstance(value, bool):
                return index
        shown = ", ".join(json.dumps(option) for option in self.options[:20])
        raise SweepError(f"{value!r} is not one of the options {shown}. Give one of them.")

    def to_json(self) -> list[object]:
        # Write the options as one list, which `choice` unpacks. Otherwise it would unpack a single option that is a list.
        return ["choice", [list(self.options)]]


@dataclass(frozen=True)
class _Range:
    """A continuous distribution with two parameters, perhaps logarithmic or rounded."""

    KIND: ClassVar[str]

    def __post_init__(self) -> None:
        name, numbers = self.to_json()
        for number in numbers:
            _number(f"{name}()", number)
        if numbers[2:] and numbers[2] <= 0:
            raise SweepError(f"{name}(): the step q={numbers[2]!r} is not above 0.")

    @property
    def shown(self) -> str:
        name, numbers = self.to_json()
        return f"{name}({', '.join(f'{number:g}' for number in numbers)})"

    def to_json(self) -> list[Any]:
        first, second, q, is_log = (getattr(self, field.name) for field in fields(self))
        is_rounded = q is not None
        return [f"{'q' * is_rounded}{'log' * is_log}{self.KIND}", [first, second, *[q] * is_rounded]]


@dataclass(frozen=True)
class Uniform(_Range):
    """A distribution of (log-)uniform numbers, rounded to multiples of `q`."""

    low: float
    high: float
    q: float | None = None
    is_log: bool = False
    KIND: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise SweepError(f"{self.shown}: {self.low:g} is not below {self.high:g}. Give the lower bound first.")
        if self.is_log and self.low <= 0:
            raise SweepError(
                f"{self.shown}: {self.low:g} has no logarithm. The bounds are the values' own, above 0, such as "
                "loguniform(1e-4, 1e-1)."
            )

    @property
    def count(self) -> int | None:
        return round(self.high / self.q) - round(self.low / self.q) + 1 if self.q else None

    def raw_at(self, quantile: float) -> float:
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            return self._clipped(math.exp(low + quantile * (high - low)))
        return self.low + quantile * (self.high - self.low)

    def value(self, raw: Raw) -> float:
        return _rounded(float(raw), self.q)

    def raw(self, value: object) -> float:
        number = _number(self.shown, value)
        # Allow half a step outside of the bounds: rounding may give such values, which users may then pass as points.
        slack = (self.q or 0) / 2
        if not self.low - slack <= number <= self.high + slack:
            raise SweepError(f"{value!r} is not in {self.shown}. Give a number from {self.low:g} to {self.high:g}.")
        return self._clipped(number)

    def _clipped(self, number: float) -> float:
        # Clip, because exp(log(x)) has a rounding error and may exceed the bounds.
        return min(max(number, self.low), self.high)


@dataclass(frozen=True)
class Normal(_Range):
    """A distribution of (log-)normal numbers, rounded to multiples of `q`."""

    mu: float
    sigma: float
    q: float | None = None
    is_log: bool = False
    KIND: ClassVar[str] = "normal"
    #: Bounds of the raw value, which is a quantile.
    low: ClassVar[float] = _TAIL
    high: ClassVar[float] = 1 - _TAIL
    count: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma <= 0:
            raise SweepError(f"{self.shown}: the standard deviation {self.sigma:g} is not above 0.")

    def raw_at(self, quantile: float) -> float:
        # Clip, because `inv_cdf` raises for 0 and 1, which `cdf` returns for numbers far from mu.
        return min(max(quantile, self.low), self.high)

    def value(self, raw: Raw) -> float:
        number = NormalDist(self.mu, self.sigma).inv_cdf(self.raw_at(raw))
        return _rounded(math.exp(number) if self.is_log else number, self.q)

    def raw(self, value: object) -> float:
        number = _number(self.shown, value)
        if self.is_log and number <= 0:
            raise SweepError(f"{value!r} is not in {self.shown}. Give a number above 0.")
        return self.raw_at(NormalDist(self.mu, self.sigma).cdf(math.log(number) if self.is_log else number))


@dataclass(frozen=True)
class Integers:
    """A distribution of uniform integers in [low, high - 1]."""

    low: int
    high: int

    def __post_init__(self) -> None:
        for bound in (self.low, self.high):
            # Refuse bool, a subclass of int: randint(True) is a mistake.
            if type(bound) is not int:
                raise SweepError(f"randint(): {bound!r} is not an integer. Write randint(10) or randint(1, 10).")
        if self.low >= self.high:
            raise SweepError(f"{self.shown} holds no integer: it goes from the first to the last but one.")

    @property
    def shown(self) -> str:
        return f"randint({self.low}, {self.high})"

    @property
    def count(self) -> int:
        return self.high - self.low

    def raw_at(self, quantile: float) -> int:
        return min(self.low + int(quantile * self.count), self.high - 1)

    def value(self, raw: Raw) -> int:
        return int(raw)

    def raw(self, value: object) -> int:
        if type(value) is not int or not self.low <= value < self.high:
            raise SweepError(f"{value!r} is not in {self.shown}. Give an integer from {self.low} to {self.high - 1}.")
        return value

    def to_json(self) -> list[object]:
        return ["randint", [self.low, self.high]]


@dataclass(frozen=True)
class Fixed:
    """A distribution that always has the same value."""

    only: object
    count: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_json(self.only)

    def raw_at(self, quantile: float) -> int:
        return 0

    def value(self, raw: Raw) -> object:
        return self.only

    def raw(self, value: object) -> int:
        if value != self.only:
            raise SweepError(f"{value!r} is not the fixed value {self.only!r}. Leave it out.")
        return 0

    def to_json(self) -> list[object]:
        return ["fixed", [self.only]]


def choice(*options: object) -> Choice:
    """Return a choice of options with equal probability: `choice(32, 64)`.

    A single list or range is unpacked: `choice([32, 64])`, `choice(range(5))`. Options that are mappings are search
    spaces: `choice({"--momentum": uniform(0, 1)}, {})`.

    Raises:
        SweepError: There are no options, JSON cannot hold an option, or only some options are search spaces.

    Examples:
        >>> space = {"--batch-size": pl.choice(32, 64), "--optimizer": pl.choice("sgd", "adam")}
    """
    if len(options) == 1 and isinstance(options[0], (list, tuple, range)):
        options = tuple(options[0])
    return Choice(options)


def uniform(low: float, high: float) -> Uniform:
    """Return a uniform distribution over [low, high].

    Raises:
        SweepError: An argument is not a number, or low is not below high.

    Examples:
        >>> space = {"--momentum": pl.uniform(0, 0.99)}
    """
    return Uniform(low, high)


def quniform(low: float, high: float, q: float) -> Uniform:
    """Return the distribution of `round(uniform(low, high) / q) * q`.

    Examples:
        >>> space = {"--dropout": pl.quniform(0, 0.5, 0.1)}  # 0.0, 0.1, ..., 0.5
    """
    return Uniform(low, high, q)


def loguniform(low: float, high: float) -> Uniform:
    """Return a log-uniform distribution over [low, high].

    Examples:
        >>> space = {"--lr": pl.loguniform(1e-5, 1e-1)}
    """
    return Uniform(low, high, is_log=True)


def qloguniform(low: float, high: float, q: float) -> Uniform:
    """Return the distribution of `round(loguniform(low, high) / q) * q`.

    Examples:
        >>> space = {"--hidden": pl.qloguniform(8, 1024, 8)}
    """
    return Uniform(low, high, q, is_log=True)


def normal(mu: float, sigma: float) -> Normal:
    """Return a normal distribution with mean mu and standard deviation sigma.

    Examples:
        >>> space = {"--bias": pl.normal(0, 0.1)}
    """
    return Normal(mu, sigma)


def qnormal(mu: float, sigma: float, q: float) -> Normal:
    """Return the distribution of `round(normal(mu, sigma) / q) * q`.

    Examples:
        >>> space = {"--width": pl.qnormal(64, 16, 8)}
    """
    return Normal(mu, sigma, q)


def lognormal(mu: float, sigma: float) -> Normal:
    """Return the distribution of `exp(normal(mu, sigma))`.

    Examples:
        >>> space = {"--weight-decay": pl.lognormal(-7, 1)}
    """
    return Normal(mu, sigma, is_log=True)


def qlognormal(mu: float, sigma: float, q: float) -> Normal:
    """Return the distribution of `round(lognormal(mu, sigma) / q) * q`.

    Examples:
        >>> space = {"--warmup": pl.qlognormal(4, 1, 10)}
    """
    return Normal(mu, sigma, q, is_log=True)


def randint(low: int, high: int | None = None) -> Integers:
    """Return a uniform distribution of integers in [low, high - 1]; without high, [0, low - 1].

    Examples:
        >>> space = {"--layers": pl.randint(1, 5)}  # 1, 2, 3 or 4
    """
    return Integers(0, low) if high is None else Integers(low, high)


def fixed(value: object) -> Fixed:
    """Return a constant. A plain value in a space means the same.

    Examples:
        >>> space = {"--epochs": pl.fixed(10), "--lr": pl.uniform(0, 1)}
    """
    return Fixed(value)


#: Name of an expression -> function that makes the expression.
FUNCTIONS: dict[str, Callable[..., Expression]] = {
    function.__name__: function
    for function in (
        *(choice, uniform, quniform, loguniform, qloguniform, normal, qnormal, lognormal, qlognormal, randint, fixed),
    )
}


def from_json(data: Sequence[Any]) -> Expression:
    """Return the expression whose `to_json` form is `data`."""
    name, arguments = data
    return FUNCTIONS[name](*arguments)


def parse(text: str) -> Expression:
    """Parse an expression such as `loguniform(1e-4, 1e-1)`.

    Text without a call is a fixed value. It is read as JSON, such as 3 or true; text that is not JSON is a string.

    Raises:
        SweepError: The name before the bracket is unknown, or the arguments are wrong.
    """
    call = call_of(text)
    if call is None:
        return Fixed(_word(text))
    name, words = call
    if name not in FUNCTIONS:
        raise SweepError(
            f"{text!r}: there is no {name}().{did_you_mean(name, FUNCTIONS)} Write one of {', '.join(FUNCTIONS)}."
        )
    try:
        # The functions' signatures check the arguments, so a command line and Python give the same errors.
        return FUNCTIONS[name](*(value for key, value in words if not key), **{k: v for k, v in words if k})
    except TypeError as error:
        raise SweepError(f"{text!r}: {str(error).removeprefix(f'{name}() ')}.") from None


def call_of(text: str) -> tuple[str, list[tuple[str, object]]] | None:
    """Parse a call. Return its name and arguments, or None for other text.

    "bandit(slack_factor=0.1)" gives ("bandit", [("slack_factor", 0.1)]). A positional argument has the name "".
    """
    name, bracket, rest = text.strip().partition("(")
    name = name.strip()
    if not bracket or not rest.endswith(")") or not name.isidentifier():
        return None
    words: list[tuple[str, object]] = []
    for word in _split(rest[:-1]):
        key, equals, value = word.partition("=")
        named = bool(equals) and key.strip().isidentifier()
        words.append((key.strip(), _word(value)) if named else ("", _word(word)))
    return name, words


def _split(text: str) -> list[str]:
    words, depth, quote = [""], 0, ""
    for character in text:
        if quote or character in "\"'":
            quote = "" if character == quote else quote or character
        elif character == "," and not depth:
            words.append("")
            continue
        depth += 0 if quote else (character in "[{(") - (character in ")}]")
        words[-1] += character
    return [word for word in words if word.strip()]


def _word(text: str) -> object:
    text = text.strip()
    # Accept single quotes, too, because shell users write choice('a b', c).
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1]
    # Try int and float after JSON, because they accept more forms: 1_000, +1, .5.
    for read in (json.loads, int, float):
        try:
            value = read(text)
        except ValueError:
            continue
        # Keep nan and inf as text: JSON has no such numbers, and the script gets the same text.
        return text if isinstance(value, float) and not math.isfinite(value) else value
    # Accept Python's spelling too. `json.loads` above reads JSON's true, false and null.
    return {"True": True, "False": False, "None": None}.get(text, text)


def _rounded(number: float, q: float | None) -> float:
    if q is None:
        return number
    rounded = round(number / q) * q
    # Round again, because 3 * 0.1 is 0.30000000000000004.
    return int(rounded) if float(q).is_integer() else float(f"{rounded:.12g}")


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a finite number and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(as_float(value))


def _number(what: str, value: object) -> float:
    if not is_number(value):
        raise SweepError(f"{what}: {value!r} is not a finite number.")
    return float(value)


def _check_json(value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise SweepError(
            f"{value!r} can't be written as JSON. Use numbers, strings, booleans, None and lists of them."
        ) from None
