"""What a policy is that pauses trials and goes on with some of them from their checkpoints.

A trial that is paused gives back its nodes, so going on with it is another submission: the trial gets one more run, which finds
the checkpoints of the former one in its own folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.errors import SweepError
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Goal, Next, Trial

#: A rung that no trial comes to: one that has it runs to its own end.
TO_ITS_END = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is to become of a trial that runs. rung: it goes on beyond so many values; None: it is paused. why: a sentence."""

    rung: int | None = None
    why: str


@runtime_checkable
class PausingPolicy(Protocol):
    """Judges trials while they run, and says which goes on when there is room."""

    @property
    def pauses(self) -> bool:
        """Whether it does so at all: ASHA without promotion only stops."""

    def judge(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, Judgement]:
        """Trial number -> what is to become of it, of those that run and have come so far that this is to be said."""

    def next(
        self, trials: Sequence[Trial], goal: Goal, space: Space, seed: int, *, is_last: bool, without: frozenset[str]
    ) -> Next | None:
        """The trial that goes on next; None where none is to, now.

        is_last: no further trial will begin. without: run ids that have left no checkpoint.
        A pure function of these: another controller, started in the place of one that was killed, says the same.
        """

    def waits(self, trial: Trial) -> bool:
        """Whether a trial without a running process may be gone on with."""

    def argument(self, rung: int) -> tuple[str, int] | None:
        """Name and value of the script's argument that says after how many values a run ends, of one that is let beyond `rung`;
        None where scripts are not told.
        """

    def told(self, trial: Trial, trials: Sequence[Trial], goal: Goal) -> str:
        """Why a trial that waits was not gone on with, for its record at the sweep's end."""

    def to_json(self) -> dict[str, Any]:
        """`{"name": ..., parameter: ...}`."""


def pausing(policy: object) -> PausingPolicy | None:
    """The policy, where it pauses trials."""
    return policy if isinstance(policy, PausingPolicy) and policy.pauses else None


def budget(policy: object, rung: int = 0) -> dict[str, int]:
    """The name and the number that tell a script after how many values it ends, of a trial that is let beyond `rung`; empty where
    scripts are not told. They are given as hyperparameters are.
    """
    found = pausing(policy)
    argument = None if found is None else found.argument(rung)
    return {} if argument is None else {argument[0]: argument[1]}


def check_budget(policy: str, budget: object, last: int | None) -> None:
    """Raises:
    SweepError: the name of an argument that can't be one, or no last interval to end at.
    """
    if budget is None:
        return
    if not isinstance(budget, str) or not budget.strip("-") or any(c.isspace() or c == "=" for c in budget):
        raise SweepError(
            f"{policy}: budget={budget!r} is no argument of the script. Give its name, such as '--epochs'."
        )
    if last is None:
        raise SweepError(
            f"{policy}: budget={budget!r} needs last: what the script is told in the end, such as last=81."
        )
