"""Policies that pause trials and continue some from their checkpoints.

A paused trial releases its nodes. To continue the trial, Paceline submits one more run of it. The folder of this run
gets the checkpoints of the former run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from paceline.errors import SweepError
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Goal, Next, Trial

#: A rung above all other rungs: a trial that is promoted to this rung runs until its script ends.
TO_ITS_END = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The decision of a policy on a live trial: continue or pause.

    Attributes:
        rung: Number of logged values until which the trial continues without another decision; None pauses the trial.
        why: The reason for the decision, as a sentence.
    """

    rung: int | None = None
    why: str


@runtime_checkable
class PausingPolicy(Protocol):
    """A policy that pauses trials and picks some to continue."""

    @property
    def pauses(self) -> bool:
        """Whether the policy pauses trials; ASHA without promotion does not."""

    def judge(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, Judgement]:
        """Return {trial number: decision} for the live trials that have reached a rung."""

    def next(
        self, trials: Sequence[Trial], goal: Goal, space: Space, seed: int, *, is_last: bool, without: frozenset[str]
    ) -> Next | None:
        """Return the next run of the trial to continue now, or None.

        The result depends only on the arguments, so a controller that replaces a crashed controller decides the same.

        `is_last`: Whether no new trial will begin.
        `without`: Ids of runs that have left no checkpoint.
        """

    def waits(self, trial: Trial) -> bool:
        """Return whether a trial without a process may continue later."""

    def argument(self, rung: int) -> tuple[str, int] | None:
        """Return the argument (name, value) that ends the script at the next rung, or None."""

    def told(self, trial: Trial, trials: Sequence[Trial], goal: Goal) -> str:
        """Return why a paused trial has not been continued."""

    def to_json(self) -> dict[str, object]:
        """Return the policy as `{"name": ..., parameter: ...}`."""


def pausing(policy: object) -> PausingPolicy | None:
    """Return the policy if it pauses trials, else None."""
    return policy if isinstance(policy, PausingPolicy) and policy.pauses else None


def budget(policy: object, rung: int = 0) -> dict[str, int]:
    """Return {script argument: value} that ends a run at the rung after `rung`, or {}."""
    pausing_policy = pausing(policy)
    argument = None if pausing_policy is None else pausing_policy.argument(rung)
    return {} if argument is None else {argument[0]: argument[1]}


def check_budget(policy: str, budget: object, last: int | None) -> None:
    """Raise SweepError unless `budget` is a script argument and `last` is given."""
    if budget is None:
        return
    if not isinstance(budget, str) or not budget.strip("-") or any(c.isspace() or c == "=" for c in budget):
        raise SweepError(f"{policy}: budget={budget!r} is not an argument of the script. Write it as '--epochs'.")
    if last is None:
        raise SweepError(f"{policy}: budget={budget!r} needs last, the final value of the argument, such as last=81.")
