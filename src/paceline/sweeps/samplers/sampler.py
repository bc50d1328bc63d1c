"""What a sampler is."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline.sweeps.expressions import Raw
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial

#: Spaces of more points than this are drawn from without asking whether a point was there.
_SMALL = 100_000


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A point for a trial. chosen: key -> raw value.

    notes: JSON that the sampler wants to find with the trial again, such as a generation's state; the child's record keeps it.
    """

    chosen: Mapping[str, Raw]
    notes: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Sampler(Protocol):
    """Proposes points. What it proposes for a trial depends on the seed, the trial's number and the trials it is told, on
    nothing else: so a sweep that was interrupted goes on as the one that was not would have.
    """

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        """The point of trial `number`; None where there is nothing left to propose.

        trials: all trials so far, those that run included.
        """


def seed_of(seed: int, number: int) -> int:
    """A seed of 32 bits for one trial. Neighbouring trials have unrelated ones."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")


class GridSampler:
    """Trial n gets the n-th point; after the last there is nothing left.

    tried: the points of the first trials, which others propose; those of the grid are left out after them.

    Raises:
        SweepError: the space has no end.
    """

    def __init__(self, space: Space, tried: Sequence[Mapping[str, Raw]] = ()) -> None:
        self._points = (point for point in space.grid() if point not in tried)
        self._first = len(tried)
        self._space = space
        self._known: list[Mapping[str, Raw]] = []

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        """The n-th point."""
        # Points are made as they are asked for: a grid may be larger than any sweep over it.
        number -= self._first
        self._known += itertools.islice(self._points, max(0, number + 1 - len(self._known)))
        return Proposal(chosen=self._known[number]) if number < len(self._known) else None


class RandomSampler:
    """Each point as likely as any other.

    repeats: let a point come twice in a space that has an end; else what is left is drawn from, and then there is nothing left.
    """

    def __init__(self, space: Space, seed: int, *, repeats: bool = False) -> None:
        self._space = space
        self._seed = seed
        size = space.size
        self._is_small = not repeats and size is not None and size <= _SMALL
        # What was said of the trials that were told before, so that a proposal does not cost more the longer a sweep is.
        self._known: set[str] = set()
        self._told = 0
        self._left: dict[str, Mapping[str, Raw]] | None = None

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        """A point; None where each point of the space has been proposed."""
        source = random.Random(seed_of(self._seed, number))
        if not self._is_small:
            return Proposal(chosen=self._drawn(source))
        self._tell(trials)
        # Draw at first, for that costs nothing; near the end of a space nearly all draws have been there.
        for _ in range(10):
            drawn = self._drawn(source)
            if self._said(drawn) not in self._known:
                return Proposal(chosen=drawn)
        # Sampled from what is left, so that the last points of a space come in a bounded time.
        if self._left is None:
            every = {self._said(point): point for point in self._space.grid()}
            self._left = {said: point for said, point in every.items() if said not in self._known}
        return Proposal(chosen=source.choice(list(self._left.values()))) if self._left else None

    def knows(self, chosen: Mapping[str, Raw], trials: Sequence[Trial]) -> bool:
        """Return True for a point that one of these trials has, in a space of few points."""
        if not self._is_small:
            return False
        self._tell(trials)
        return self._said(chosen) in self._known

    def _tell(self, trials: Sequence[Trial]) -> None:
        # Trials are only ever added; a list that is no longer than the last one is another sweep's.
        if len(trials) < self._told:
            self._known, self._told, self._left = set(), 0, None
        for trial in trials[self._told :]:
            # By their values: of a quantised range, many raw values are one for the script.
            said = self._said(trial.chosen)
            self._known.add(said)
            if self._left is not None:
                self._left.pop(said, None)
        self._told = len(trials)

    def _said(self, chosen: Mapping[str, Raw]) -> str:
        return repr(sorted(self._space.values(chosen).items()))

    def _drawn(self, source: random.Random) -> dict[str, Raw]:
        return self._space.draw(lambda dimension: dimension.expression.raw_at(source.random()))
