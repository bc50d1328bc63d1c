"""The expressions that a space is made of: what a hyperparameter may be.

Each has a *raw* value, which samplers work with and records keep, and a value, which the script gets. They differ where a
sampler can do nothing with the value itself: a choice's raw value is the index of its option, for an option may be any JSON;
a normal's is its quantile, for samplers know bounded ranges alone; that of a quantised range is what was drawn before it
was rounded.

The definitions are those of the Azure SDK's and Hyperopt's expressions of the same names, but for one thing: the bounds of
`loguniform` are the values' own, not their logarithms. `qX(..., q)` is `round(x / q) * q`, which may leave the bounds by up
to q / 2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard, runtime_checkable

from paceline.errors import SweepError
from paceline.system.names import did_you_mean

Raw: TypeAlias = "int | float"

#: Quantiles nearer to 0 and 1 than this are cut off: a normal reaches over the whole line, and its ends lie at infinity.
_TAIL = 1e-9


@runtime_checkable
class Expression(Protocol):
    """What a hyperparameter may be."""

    @property
    def count(self) -> int | None:
        """How many values there are; None for a continuum."""

    def raw_at(self, quantile: float) -> Raw:
        """The raw value at a quantile in [0, 1): a uniform number gives one drawn from this expression."""

    def value(self, raw: Raw) -> Any:
        """What the script gets for it."""

    def raw(self, value: Any) -> Raw:
        """The raw value whose value this is.

        Raises:
            SweepError: there is none.
        """

    def to_json(self) -> list[Any]:
        """`[name, arguments]`, as the Azure SDK writes them."""


@dataclass(frozen=True)
class Choice:
    """One of several options: any JSON values, or mappings, each of them a space of its own."""

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
        # The bound is for a quantile of 1 itself, which would point behind the last option.
        return min(int(quantile * len(self.options)), len(self.options) - 1)

    def value(self, raw: Raw) -> Any:
        return self.options[int(raw)]

    def raw(self, value: Any) -> int:
        for index, option in enumerate(self.options):
            # To Python 1 == True, but choice(1, True) has two options, and the script gets another word for each.
            if option == value and isinstance(option, bool) == isinstance(value, bool):
                return index
        shown = ", ".join(json.dumps(option) for option in self.options[:20])
        raise SweepError(f"{value!r} is none of the options {shown}. Give one of them.")

    def to_json(self) -> list[Any]:
        # The options stand in one list, for `choice` unpacks a single argument that is a list: an option that is a list stays
        # one.
        return ["choice", [list(self.options)]]


@dataclass(frozen=True)
class Uniform:
    """A number from low to high, each as likely, or, with is_log, each logarithm as likely; with q, rounded to its multiples."""

    low: float
    high: float
    q: float | None = None
    is_log: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self.name, self.low, self.high, self.q)
        if not self.low < self.high:
            raise SweepError(f"{_shown(self)}: {self.low:g} is not below {self.high:g}. Give the lower bound first.")
        if self.is_log and self.low <= 0:
            raise SweepError(
                f"{_shown(self)}: {self.low:g} has no logarithm. The bounds are the values' own, above 0, such as "
                "loguniform(1e-4, 1e-1)."
            )

    @property
    def name(self) -> str:
        return f"{'q' if self.q else ''}{'log' if self.is_log else ''}uniform"

    @property
    def count(self) -> int | None:
        return round(self.high / self.q) - round(self.low / self.q) + 1 if self.q else None

    def raw_at(self, quantile: float) -> float:
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            # exp(log(x)) may miss x by a rounding error, and a value beyond the bounds would not be one of this range.
            return min(max(math.exp(low + quantile * (high - low)), self.low), self.high)
        return self.low + quantile * (self.high - self.low)

    def value(self, raw: Raw) -> Any:
        return _rounded(float(raw), self.q)

    def raw(self, value: Any) -> float:
        number = _number(_shown(self), value)
        # A value of a trial was rounded to its step and may lie up to half a step outside; it can be given again as a point.
        slack = (self.q or 0) / 2
        if not self.low - slack <= number <= self.high + slack:
            raise SweepError(f"{value!r} is not in {_shown(self)}. Give a number from {self.low:g} to {self.high:g}.")
        return min(max(number, self.low), self.high)

    def to_json(self) -> list[Any]:
        return [self.name, [self.low, self.high, *([self.q] if self.q else [])]]


@dataclass(frozen=True)
class Normal:
    """A number around mu with the standard deviation sigma, or, with is_log, one whose logarithm is; with q, rounded."""

    mu: float
    sigma: float
    q: float | None = None
    is_log: bool = False
    #: Its raw value is a quantile.
    low: ClassVar[float] = _TAIL
    high: ClassVar[float] = 1 - _TAIL

    def __post_init__(self) -> None:
        _check_numbers(self.name, self.mu, self.sigma, self.q)
        if self.sigma <= 0:
            raise SweepError(f"{_shown(self)}: the standard deviation {self.sigma:g} is not above 0.")

    @property
    def name(self) -> str:
        return f"{'q' if self.q else ''}{'log' if self.is_log else ''}normal"

    @property
    def count(self) -> None:
        return None

    def raw_at(self, quantile: float) -> float:
        # `inv_cdf` raises for 0 and for 1, and `cdf` returns these for numbers far enough from mu.
        return min(max(quantile, self.low), self.high)

    def value(self, raw: Raw) -> Any:
        number = NormalDist(self.mu, self.sigma).inv_cdf(self.raw_at(raw))
        return _rounded(math.exp(number) if self.is_log else number, self.q)

    def raw(self, value: Any) -> float:
        number = _number(_shown(self), value)
        if self.is_log and number <= 0:
            raise SweepError(f"{value!r} is not in {_shown(self)}. Give a number above 0.")
        return self.raw_at(NormalDist(self.mu, self.sigma).cdf(math.log(number) if self.is_log else number))

    def to_json(self) -> list[Any]:
        return [self.name, [self.mu, self.sigma, *([self.q] if self.q else [])]]


@dataclass(frozen=True)
class Integers:
    """An integer from low to high - 1, each as likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        for bound in (self.low, self.high):
            # isinstance(True, int) holds, and randint(True) is a mistake.
            if isinstance(bound, bool) or not isinstance(bound, int):
                raise SweepError(f"randint(): {bound!r} is not an integer. Write randint(10) or randint(1, 10).")
        if self.low >= self.high:
            raise SweepError(
                f"{_shown(self)} holds no integer: it goes from the first to the last but one. Raise the last."
            )

    @property
    def count(self) -> int:
        return self.high - self.low

    def raw_at(self, quantile: float) -> int:
        return min(self.low + int(quantile * self.count), self.high - 1)

    def value(self, raw: Raw) -> int:
        return int(raw)

    def raw(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value < self.high:
            raise SweepError(f"{value!r} is not in {_shown(self)}. Give an integer from {self.low} to {self.high - 1}.")
        return value

    def to_json(self) -> list[Any]:
        return ["randint", [self.low, self.high]]


@dataclass(frozen=True)
class Fixed:
    """One value."""

    only: Any

    def __post_init__(self) -> None:
        _check_json(self.only)

    @property
    def count(self) -> int:
        return 1

    def raw_at(self, quantile: float) -> int:
        return 0

    def value(self, raw: Raw) -> Any:
        return self.only

    def raw(self, value: Any) -> int:
        if value != self.only:
            raise SweepError(f"{value!r} is not the fixed value {self.only!r}. Leave it out.")
        return 0

    def to_json(self) -> list[Any]:
        return ["fixed", [self.only]]


def choice(*options: Any) -> Choice:
    """One of the options, each as likely: `choice(32, 64)`; `choice([32, 64])` and `choice(range(5))` are the same as their
    members. Options that are mappings are spaces of their own: `choice({"--momentum": uniform(0, 1)}, {})`.

    Raises:
        SweepError: no options, one that JSON can't hold, or spaces among values.
    """
    if len(options) == 1 and isinstance(options[0], (list, tuple, range)):
        options = tuple(options[0])
    return Choice(options)


def uniform(low: float, high: float) -> Uniform:
    """A number from low to high, each as likely.

    Raises:
        SweepError: no numbers, or low is not below high. So for the others.
    """
    return Uniform(low, high)


def quniform(low: float, high: float, q: float) -> Uniform:
    """`round(uniform(low, high) / q) * q`."""
    return Uniform(low, high, _step("quniform", q))


def loguniform(low: float, high: float) -> Uniform:
    """A number from low to high, both above 0, each logarithm as likely. The bounds are not logarithms."""
    return Uniform(low, high, is_log=True)


def qloguniform(low: float, high: float, q: float) -> Uniform:
    """`round(loguniform(low, high) / q) * q`."""
    return Uniform(low, high, _step("qloguniform", q), is_log=True)


def normal(mu: float, sigma: float) -> Normal:
    """A number around mu with the standard deviation sigma."""
    return Normal(mu, sigma)


def qnormal(mu: float, sigma: float, q: float) -> Normal:
    """`round(normal(mu, sigma) / q) * q`."""
    return Normal(mu, sigma, _step("qnormal", q))


def lognormal(mu: float, sigma: float) -> Normal:
    """`exp(normal(mu, sigma))`: mu and sigma are those of the logarithm."""
    return Normal(mu, sigma, is_log=True)


def qlognormal(mu: float, sigma: float, q: float) -> Normal:
    """`round(lognormal(mu, sigma) / q) * q`."""
    return Normal(mu, sigma, _step("qlognormal", q), is_log=True)


def randint(low: int, high: int | None = None) -> Integers:
    """An integer from low to high - 1; with one argument, from 0 to it, less 1."""
    return Integers(0, low) if high is None else Integers(low, high)


def fixed(value: Any) -> Fixed:
    """One value; a plain value in a space means the same."""
    return Fixed(value)


FUNCTIONS = {
    function.__name__: function
    for function in (
        *(choice, uniform, quniform, loguniform, qloguniform, normal, qnormal, lognormal, qlognormal, randint, fixed),
    )
}


def from_json(data: Sequence[Any]) -> Expression:
    """The expression that `to_json` wrote."""
    name, arguments = data
    expression: Expression = FUNCTIONS[name](*arguments)
    return expression


def parse(text: str) -> Expression:
    """The expression that a command line or a file says: `loguniform(1e-4, 1e-1)`, `choice(relu, gelu)`; else a fixed value.

    Words are numbers, true, false, null, JSON, else strings.

    Raises:
        SweepError: an unknown name before the bracket, or wrong arguments.
    """
    call = call_of(text)
    if call is None:
        return Fixed(_word(text))
    name, words = call
    function = FUNCTIONS.get(name)
    if function is None:
        raise SweepError(
            f"{text!r}: there is no {name}().{did_you_mean(name, FUNCTIONS)} Write one of {', '.join(FUNCTIONS)}."
        )
    try:
        # The functions' own signatures check number and names of the arguments, so a command line and Python say the same.
        expression: Expression = function(*(value for key, value in words if not key), **{k: v for k, v in words if k})
    except TypeError as error:
        raise SweepError(f"{text!r}: {str(error).removeprefix(f'{name}() ')}.") from None
    return expression


def call_of(text: str) -> tuple[str, list[tuple[str, Any]]] | None:
    """("bandit", [("slack_factor", 0.1)]) of "bandit(slack_factor=0.1)"; a word without a name has the name "". None of what
    is no call.
    """
    name, bracket, rest = text.strip().partition("(")
    name = name.strip()
    if not bracket or not rest.endswith(")") or not name.isidentifier():
        return None
    words: list[tuple[str, Any]] = []
    for word in _split(rest[:-1]):
        key, equals, value = word.partition("=")
        named = bool(equals) and key.strip().isidentifier()
        words.append((key.strip(), _word(value)) if named else ("", _word(word)))
    return name, words


def _split(text: str) -> list[str]:
    """The words between commas, but for those inside of brackets and quotes."""
    words, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif character == "," and not depth:
            words.append("")
            continue
        words[-1] += character
    return [word for word in words if word.strip()]


def _word(text: str) -> Any:
    text = text.strip()
    # JSON knows double quotes alone; a shell's user writes choice('a b', c).
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1]
    # int and float take what JSON does not: 1_000, +1, .5.
    for read in (json.loads, int, float):
        try:
            found = read(text)
        except ValueError:
            continue
        # JSON has no nan and no inf, which records are written in; the script gets the word all the same.
        return text if isinstance(found, float) and not math.isfinite(found) else found
    # As Python writes them; JSON's true, false and null have been read above.
    return {"True": True, "False": False, "None": None}.get(text, text)


def _rounded(number: float, q: float | None) -> Any:
    if q is None:
        return number
    rounded = round(number / q) * q
    # 3 * 0.1 is 0.30000000000000004: a step of so many digits gives values of so many digits.
    return int(rounded) if float(q).is_integer() else float(f"{rounded:.12g}")


def _check_numbers(name: str, *numbers: float | None) -> None:
    for number in numbers:
        if number is not None:
            _number(f"{name}()", number)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number; a truth value is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _number(what: str, value: Any) -> float:
    if not is_number(value):
        raise SweepError(f"{what}: {value!r} is not a finite number.")
    return float(value)


def _step(name: str, q: float) -> float:
    if _number(f"{name}()", q) <= 0:
        raise SweepError(f"{name}(): the step q={q!r} is not above 0.")
    return q


def _shown(expression: Expression) -> str:
    name, arguments = expression.to_json()
    return f"{name}({', '.join(f'{argument:g}' for argument in arguments)})"


def _check_json(value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise SweepError(
            f"{value!r} can't be written as JSON. Use numbers, strings, booleans, None and lists of them."
        ) from None
