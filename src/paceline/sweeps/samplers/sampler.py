"""What a sampler is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from paceline.sweeps.expressions import Raw
from paceline.sweeps.trial import Trial


@runtime_checkable
class Sampler(Protocol):
    """Proposes points. What it proposes for a trial depends on the seed, the trial's number and the trials it is told, on
    nothing else: so a sweep that was interrupted goes on as the one that was not would have."""

    def propose(self, number: int, trials: Sequence[Trial]) -> Mapping[str, Raw] | None:
        """Key -> raw value of trial `number`; None where there is nothing left to propose.

        trials: all trials so far, those that run included.
        """


def seed_of(seed: int, number: int) -> int:
    """A seed of 32 bits for one trial. Neighbouring trials have unrelated ones."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")
