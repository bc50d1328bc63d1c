"""What each trial of a sweep tries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.sweeps.samplers.sampler import Proposal
from paceline.sweeps.samplers.samplers import make_sampler
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial


class Proposals:
    """The user's own points first, then what the sampler proposes.

    source: the folder in which the module of a user's own sampler is looked for. prior: results of former sweeps.

    Raises:
        SweepError: as `samplers.make_sampler`.
    """

    def __init__(self, spec: SweepSpec, source: Path, prior: Sequence[Trial] = ()) -> None:
        # As raw values, so that samplers learn from them like from any other.
        self._points = [spec.space.chosen(point) for point in spec.points]
        self._sampler = make_sampler(
            spec.sampler,
            spec.space,
            spec.seed,
            spec.goals,
            repeats=spec.repeats,
            source=source,
            prior=prior,
            tried=self._points,
        )

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        """The point of trial `number`; None where there is nothing left to propose. trials: all those before it."""
        if number < len(self._points):
            return Proposal(chosen=self._points[number])
        return self._sampler.propose(number, trials)
