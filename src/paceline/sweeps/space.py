"""Search spaces: names and their expressions, nested and conditional.

    Space({"--lr": loguniform(1e-4, 1e-1),
           "model": {"layers": choice(2, 4)},                       # model.layers
           "optimizer": choice({"--momentum": uniform(0, 0.99)},    # --momentum, if this branch is chosen
                               {"beta": uniform(0.9, 0.999)})})     # optimizer.beta

A name in a mapping gets the mapping's name and a dot as prefix, unless it begins with a dash. The script does not get
the name of a choice between spaces: the other names show which space was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import SweepError
from paceline.sweeps import expressions
from paceline.sweeps.expressions import Choice, Expression, Fixed, Raw


@dataclass(frozen=True)
class Dimension:
    """One hyperparameter of a search space.

    Attributes:
        key: Unique name for samplers and records. It includes the choices whose options lead to this hyperparameter.
        name: The hyperparameter's name for the script.
        branches: For a choice between spaces, the dimensions of each space; empty for other hyperparameters.
    """

    key: str
    name: str
    expression: Expression
    branches: tuple[tuple[Dimension, ...], ...] = ()


class Space:
    """A search space: the points that a sweep's trials may have.

    Raises:
        SweepError: The space is not a mapping or is empty, a name is invalid, or two names are equal.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        if not isinstance(parts, Mapping) or not parts:
            raise SweepError(f'the space {parts!r} must be a mapping with a name. Give {{"--lr": pl.uniform(0, 1)}}.')
        self.dimensions = _dimensions(parts, "", "")
        for names in _names(self.dimensions):
            _check_names(names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and other.dimensions == self.dimensions

    def __hash__(self) -> int:
        return hash(repr(self.dimensions))

    def draw(self, choose: Callable[[Dimension], Raw]) -> dict[str, Raw]:
        """Return a point as {key: raw value}, whose values `choose` picks.

        Args:
            choose: Returns a dimension's raw value. A choice comes before the dimensions of its chosen option.
        """
        chosen: dict[str, Raw] = {}
        waiting = list(self.dimensions)
        while waiting:
            dimension = waiting.pop(0)
            chosen[dimension.key] = raw = choose(dimension)
            if dimension.branches:
                # Insert the branch's dimensions at the front, so that the keys have the same order as the keys of `grid`.
                waiting[:0] = dimension.branches[int(raw)]
        return chosen

    def values(self, chosen: Mapping[str, Raw]) -> dict[str, object]:
        """Convert a point's raw values to {name: value}, as the script gets them."""
        values: dict[str, object] = {}

        def choose(dimension: Dimension) -> Raw:
            raw = chosen[dimension.key]
            # A choice between branches has no value: the names of the chosen branch's parameters show the choice.
            if not dimension.branches:
                values[dimension.name] = dimension.expression.value(raw)
            return raw

        self.draw(choose)
        return values

    def chosen(self, values: Mapping[str, object]) -> dict[str, Raw]:
        """Return a script's hyperparameter `values` as {key: raw value} for samplers.

        Raises:
            SweepError: A value is not in the space, or a name is missing or unknown.
        """
        known = {_plain(name): value for name, value in values.items()}
        taken: set[str] = set()

        def choose(dimension: Dimension) -> Raw:
            if dimension.branches:
                return _branch(dimension, known)
            name = _plain(dimension.name)
            if name not in known:
                # A point may omit a constant, whose raw value is always 0.
                if isinstance(dimension.expression, Fixed):
                    return 0
                raise SweepError(f"the point {dict(values)!r} has no {dimension.name}. Give all of them.")
            taken.add(name)
            try:
                return dimension.expression.raw(known[name])
            except SweepError as error:
                raise SweepError(f"{dimension.name}: {error}") from None

        chosen = self.draw(choose)
        if unknown := sorted(set(known) - taken):
            raise SweepError(
                f"the point {dict(values)!r} has {unknown[0]!r}, which the space has not at this place. Remove it."
            )
        return chosen

    @property
    def parameters(self) -> list[Dimension]:
        """The hyperparameters that the script may get, from all branches of choices."""
        return [dimension for dimension in every(self.dimensions) if not dimension.branches]

    @property
    def names(self) -> list[str]:
        """The names of all hyperparameters that the script gets."""
        return list(dict.fromkeys(dimension.name for dimension in self.parameters))

    @property
    def size(self) -> int | None:
        """Number of points, or None for a continuous space."""
        return _size(self.dimensions)

    def grid(self) -> Iterator[dict[str, Raw]]:
        """Return all points of a finite space; the last name changes fastest.

        Raises:
            SweepError: A name has infinitely many values.
        """
        # Check here, because the generator `_grid` would raise only when the sweep already runs.
        for dimension in every(self.dimensions):
            if dimension.expression.count is None:
                raise SweepError(
                    f"{dimension.name}: {dimension.expression.to_json()[0]}() has no end of values, and a grid takes each. "
                    "Give choice() or randint(), or take the sampler random."
                )
        return _grid(self.dimensions)

    def to_json(self) -> dict[str, object]:
        return {dimension.name: _json(dimension) for dimension in self.dimensions}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Space:
        return cls({name: _parsed(part) for name, part in data.items()})

    def parts(self) -> dict[str, object]:
        """Return the space as a dict of names to expressions."""
        return {name: _parsed(part) for name, part in self.to_json().items()}


def argument(name: str) -> str:
    """Return a name as an argument: `--lr` for lr, `-b` for -b."""
    return name if name.startswith("-") else f"--{name}"


def _plain(name: str) -> str:
    return name.lstrip("-")


def _dimensions(parts: Mapping[str, object], above: str, branch: str) -> tuple[Dimension, ...]:
    dimensions: list[Dimension] = []
    for name, part in parts.items():
        if (
            not isinstance(name, str)
            or not _plain(name)
            or any(character.isspace() or character in "=\0" for character in name)
        ):
            raise SweepError(f"{name!r} is not a name of a hyperparameter. Use letters, digits, `_`, `-` and `.`.")
        whole = name if name.startswith("-") or not above else f"{above}.{name}"
        # Include the branch in the key: two branches may give one name different ranges, which a sampler must not mix.
        key = f"{branch}{whole}"
        if isinstance(part, Mapping):
            if not part:
                raise SweepError(f"{whole}: the mapping is empty. Give it a name, or leave it out.")
            dimensions += _dimensions(part, whole, branch)
        elif isinstance(part, Choice) and part.is_of_spaces:
            branches = tuple(_dimensions(option, whole, f"{key}[{n}]/") for n, option in enumerate(part.options))
            dimensions.append(Dimension(key, whole, part, branches))
        else:
            try:
                expression = part if isinstance(part, Expression) else Fixed(part)
            except SweepError as error:
                raise SweepError(f"{whole}: {error}") from None
            dimensions.append(Dimension(key, whole, expression))
    return tuple(dimensions)


def _names(dimensions: tuple[Dimension, ...]) -> list[list[str]]:
    sets: list[list[str]] = [[]]
    for dimension in dimensions:
        options = [names for branch in dimension.branches for names in _names(branch)] or [[]]
        own = [] if dimension.branches else [dimension.name]
        sets = [[*names, *own, *more] for names in sets for more in options]
    return sets


def _check_names(names: list[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        # Compare names without dashes, since `lr` and `--lr` are the same argument.
        if (other := seen.setdefault(_plain(name), name)) is not name:
            raise SweepError(f"{other!r} and {name!r} are one name of the script's, given twice. Remove one.")


def _branch(dimension: Dimension, known: Mapping[str, object]) -> int:
    fits = []
    for index, branch in enumerate(dimension.branches):
        for names in _names(branch):
            if all(_plain(name) in known for name in names):
                # Negate the index, so that the first of equally good branches wins.
                fits.append((len(names), -index))
    if not fits:
        raise SweepError(f"no branch of {dimension.name} has all its names in the point. Give those of one branch.")
    return -max(fits)[1]


def every(dimensions: Iterable[Dimension]) -> Iterator[Dimension]:
    """Yield the dimensions and, recursively, the dimensions of their branches."""
    for dimension in dimensions:
        yield dimension
        for branch in dimension.branches:
            yield from every(branch)


def _size(dimensions: tuple[Dimension, ...]) -> int | None:
    sizes: list[int] = []
    for dimension in dimensions:
        branches = [_size(branch) for branch in dimension.branches]
        size = sum(s for s in branches if s is not None) if branches else dimension.expression.count
        if size is None or None in branches:
            return None
        sizes.append(size)
    # A branch without parameters, {}, is one point: an empty product.
    return math.prod(sizes)


def _grid(waiting: tuple[Dimension, ...]) -> Iterator[dict[str, Raw]]:
    if not waiting:
        yield {}
        return
    dimension, rest = waiting[0], waiting[1:]
    for raw in _raws(dimension.expression):
        inside = dimension.branches[int(raw)] if dimension.branches else ()
        for others in _grid((*inside, *rest)):
            yield {dimension.key: raw, **others}


def _raws(expression: Expression) -> list[Raw]:
    if isinstance(expression, expressions.Uniform):
        assert expression.q is not None, "a continuum is refused before"
        first, last = round(expression.low / expression.q), round(expression.high / expression.q)
        # The first and last multiple of `q` may exceed the bounds. Clip both: a clipped raw value rounds to the same multiple.
        return [min(max(n * expression.q, expression.low), expression.high) for n in range(first, last + 1)]
    if isinstance(expression, expressions.Integers):
        return list(range(expression.low, expression.high))
    return list(range(expression.count or 0))


def _json(dimension: Dimension) -> object:
    if not dimension.branches:
        return dimension.expression.to_json()
    # Remove the prefix of names, which are relative to their choice in JSON: `_dimensions` adds the prefix again.
    above = f"{dimension.name}."
    return [
        "choice",
        [[{inner.name.removeprefix(above): _json(inner) for inner in branch} for branch in dimension.branches]],
    ]


def _parsed(part: Any) -> object:
    name, arguments = part
    if name == "choice" and arguments[0] and isinstance(arguments[0][0], Mapping):
        return Choice(tuple({inner: _parsed(of) for inner, of in option.items()} for option in arguments[0]))
    return expressions.from_json(part)
