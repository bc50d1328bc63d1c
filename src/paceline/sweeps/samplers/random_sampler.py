"""Points drawn independently of each other."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from paceline.sweeps.expressions import Raw
from paceline.sweeps.samplers.sampler import Proposal, seed_of
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial

#: Spaces of more points than this are drawn from without asking whether a point was there.
_SMALL = 100_000


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
