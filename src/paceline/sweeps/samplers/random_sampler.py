"""Points drawn independently of each other."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from paceline.sweeps.expressions import Raw
from paceline.sweeps.samplers.sampler import seed_of
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

    def propose(self, number: int, trials: Sequence[Trial]) -> Mapping[str, Raw] | None:
        """Key -> raw value; None where each point of the space has been proposed."""
        source = random.Random(seed_of(self._seed, number))
        if not self._is_small:
            return self._drawn(source)
        # By their values: of a quantised range, many raw values are one for the script.
        known = {self._said(trial.chosen) for trial in trials}
        # Draw at first, for that costs nothing; near the end of a space nearly all draws have been there.
        for _ in range(10):
            drawn = self._drawn(source)
            if self._said(drawn) not in known:
                return drawn
        # Sampled from what is left, so that the last points of a space come in a bounded time.
        left = [point for point in self._space.grid() if self._said(point) not in known]
        return source.choice(left) if left else None

    def _said(self, chosen: Mapping[str, Raw]) -> str:
        return repr(sorted(self._space.values(chosen).items()))

    def _drawn(self, source: random.Random) -> dict[str, Raw]:
        return self._space.draw(lambda dimension: dimension.expression.raw_at(source.random()))
