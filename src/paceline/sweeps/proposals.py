"""What each trial of a sweep tries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.sweeps.expressions import Raw
from paceline.sweeps.samplers.samplers import make_sampler
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial


class Proposals:
    """The user's own points first, then what the sampler proposes.

    source: the folder in which the module of a user's own sampler is looked for.

    Raises:
        SweepError: as `samplers.make_sampler`.
    """

    def __init__(self, spec: SweepSpec, source: Path) -> None:
        self._space = spec.space
        self._points = spec.points
        self._sampler = make_sampler(
            spec.sampler, spec.space, spec.seed, (spec.goal,), repeats=spec.repeats, source=source
        )

    def propose(self, number: int, trials: Sequence[Trial]) -> dict[str, Raw] | None:
        """Key -> raw value of trial `number`; None where there is nothing left to propose. trials: all those before it."""
        # As raw values, so that samplers learn from them like from any other.
        if number < len(self._points):
            return self._space.chosen(self._points[number])
        proposed = self._sampler.propose(number, trials)
        return None if proposed is None else dict(proposed)
