"""The sampler protocol, and the grid and random samplers."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from paceline.sweeps.expressions import Raw
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial

#: Maximum number of points of a space in which repeated points are avoided. In larger spaces points may repeat.
_SMALL = 100_000


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The point (hyperparameter values) that a sampler proposes for a trial.

    Attributes:
        chosen: Key of each dimension -> its raw value, such as the index of a choice's option.
        notes: JSON that the sampler stores with the trial, such as the state of its optimizer.
    """

    chosen: Mapping[str, Raw]
    notes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@runtime_checkable
class Sampler(Protocol):
    """A source of points (hyperparameter values) for a sweep's trials.

    A proposal depends only on the seed, the trial's number and the given trials. So a sweep that is interrupted and
    continued gets the same proposals as an uninterrupted sweep.
    """

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        """Return the point of trial `number`; None if the space has no further point."""


def seed_of(seed: int, number: int) -> int:
    """Return a 32-bit seed for one trial, unrelated to its neighbours' seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")


class GridSampler:
    """A sampler of all points of a finite space, in order.

    Args:
        tried: Points that the user chose for the first trials; the grid skips these points.

    Raises:
        SweepError: The space is infinite.
    """

    def __init__(self, space: Space, tried: Sequence[Mapping[str, Raw]] = ()) -> None:
        self._points = (point for point in space.grid() if point not in tried)
        self._first = len(tried)
        self._space = space
        self._known: list[Mapping[str, Raw]] = []

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        # Generate points lazily, because a grid may be far larger than the sweep.
        number -= self._first
        self._known += itertools.islice(self._points, max(0, number + 1 - len(self._known)))
        return Proposal(chosen=self._known[number]) if number < len(self._known) else None


class RandomSampler:
    """A sampler of independent random points.

    Args:
        repeats: Whether a point may repeat. If not, a small finite space has no further proposal after its last point.
    """

    def __init__(self, space: Space, seed: int, *, repeats: bool = False) -> None:
        self._space = space
        self._seed = seed
        size = space.size
        self._is_small = not repeats and size is not None and size <= _SMALL
        # Points of all earlier trials, kept so that a proposal does not take longer in a large sweep.
        self._known: set[str] = set()
        self._told = 0
        self._left: dict[str, Mapping[str, Raw]] | None = None

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        """Return a random point, or None if every point has been proposed."""
        source = random.Random(seed_of(self._seed, number))
        if not self._is_small:
            return Proposal(chosen=self._drawn(source))
        self._tell(trials)
        # Draw at random first, which is cheap while many points remain.
        for _ in range(10):
            drawn = self._drawn(source)
            if self._said(drawn) not in self._known:
                return Proposal(chosen=drawn)
        # Most points are used, so draw from the list of the remaining points: drawing at random would take too long.
        if self._left is None:
            every = {self._said(point): point for point in self._space.grid()}
            self._left = {said: point for said, point in every.items() if said not in self._known}
        return Proposal(chosen=source.choice(list(self._left.values()))) if self._left else None

    def knows(self, chosen: Mapping[str, Raw], trials: Sequence[Trial]) -> bool:
        """Return whether a trial has this point already. In large spaces, return False."""
        if not self._is_small:
            return False
        self._tell(trials)
        return self._said(chosen) in self._known

    def _tell(self, trials: Sequence[Trial]) -> None:
        # A sweep's list of trials only grows, so a shorter list belongs to another sweep.
        if len(trials) < self._told:
            self._known, self._told, self._left = set(), 0, None
        for trial in trials[self._told :]:
            # Compare values, because many raw values of a quantized range give the same value.
            said = self._said(trial.chosen)
            self._known.add(said)
            if self._left is not None:
                self._left.pop(said, None)
        self._told = len(trials)

    def _said(self, chosen: Mapping[str, Raw]) -> str:
        return repr(sorted(self._space.values(chosen).items()))

    def _drawn(self, source: random.Random) -> dict[str, Raw]:
        return self._space.draw(lambda dimension: dimension.expression.raw_at(source.random()))
