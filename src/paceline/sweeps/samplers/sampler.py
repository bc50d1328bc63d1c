"""What a sampler is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline.sweeps.expressions import Raw
from paceline.sweeps.trial import Trial


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
