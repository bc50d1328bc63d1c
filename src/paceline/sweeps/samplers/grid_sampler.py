"""Each point of a space, in order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from paceline.sweeps.expressions import Raw
from paceline.sweeps.samplers.sampler import Proposal
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial


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
