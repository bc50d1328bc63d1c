"""Asynchronous successive halving (ASHA), and Hyperband, which distributes trials among several ASHA brackets.

Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020; Li et al., Hyperband, JMLR 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SweepError
from paceline.runs import states
from paceline.sweeps.policies import promotion
from paceline.sweeps.policies.pausing import Judgement, check_budget
from paceline.sweeps.policies.policy import NamedPolicy, check_whole
from paceline.sweeps.policies.promotion import Ladder
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Goal, Next, Trial, cost


@dataclass(frozen=True, kw_only=True)
class ASHA(NamedPolicy):
    """A policy that keeps the best 1 / eta of the trials at each rung.

    A rung is a number of logged values at which trials are compared. The policy stops trials that are not among the
    best. With promote, it pauses such a trial, and continues it from its checkpoints once it is among the best.

        rungs  first, first * eta, first * eta^2, ... below last        first 3, eta 3, last 81:  3  9  27

    Args:
        first: Number of logged values at the first rung. With 1, trials whose curves start slowly are stopped.
        eta: A rung keeps 1 / eta of its trials; 2 or more.
        last: Number of values that the script logs until it ends; None if unknown.
        bracket: Number of rungs to skip at the beginning. Each of Hyperband's brackets skips another number of rungs.
        promote: Whether to pause and promote trials. The script must resume from `PACELINE_CHECKPOINT_DIR`.
        budget: With promote, the script's argument, such as "--epochs", that sets how many values the script logs in
            all until it ends. Each run then ends itself at its rung. A budget needs `last`.

    Raises:
        SweepError: A number is out of range, or a budget has no promote or no last.

    Examples:
        >>> script = pl.Estimator(entry_script="train.py")
        >>> sweep = pl.Sweep(script, {"--lr": pl.uniform(0, 1)}, metric="loss", stop=pl.ASHA(first=2, eta=2, last=8))
    """

    NAME: ClassVar[str] = "asha"

    first: int = 3
    eta: int = 3
    last: int | None = None
    bracket: int = 0
    promote: bool = False
    budget: str | None = None

    def __post_init__(self) -> None:
        check_whole("ASHA", "first", self.first, at_least=1)
        check_whole("ASHA", "eta", self.eta, at_least=2)
        check_whole("ASHA", "bracket", self.bracket, at_least=0)
        if self.last is not None:
            check_whole("ASHA", "last", self.last, at_least=self.first)
        if not isinstance(self.promote, bool):
            raise SweepError(f"ASHA: promote={self.promote!r}: write true or false.")
        if self.budget is not None and not self.promote:
            raise SweepError(f"ASHA: budget={self.budget!r} needs promote=True: only then a trial goes on at its end.")
        check_budget("ASHA", self.budget, self.last)

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Return {trial number: reason} for live trials that must stop."""
        reasons: dict[int, str] = {}
        rungs: dict[int, list[float]] = {}
        for trial in trials:
            if trial.is_over or self.promote:
                continue
            # Check all rungs that the trial has reached: better trials may have reached an early rung since.
            for rung in self._ladder.up_to(len(trial.curve)):
                if rung not in rungs:
                    rungs[rung] = _there(rung, trials, goal)
                if reason := self._behind(trial, rung, rungs[rung], goal):
                    reasons[trial.number] = reason
                    break
        return reasons

    def _behind(self, trial: Trial, rung: int, there: Sequence[float], goal: Goal) -> str | None:
        own = trial.best(goal, rung)
        # Keep the best 1 / eta of the results, rounded down. With fewer than eta results, judge no trial.
        keep = len(there) // self.eta
        # A trial without a finite value continues.
        if own is None or not keep or cost(own, goal) <= there[keep - 1]:
            return None
        return (
            f"ASHA: its best of {own:g} after {rung} values is not among the best {keep} of {len(there)} trials "
            f"that came so far"
        )

    @property
    def pauses(self) -> bool:
        """Whether the policy pauses trials at rungs, which requires `promote`."""
        return self.promote

    def judge(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, Judgement]:
        """Return {trial number: decision} for the live trials that have reached a rung."""
        return {} if self.budget else promotion.judge(self._ladder, trials, goal)

    def next(
        self, trials: Sequence[Trial], goal: Goal, space: Space, seed: int, *, is_last: bool, without: frozenset[str]
    ) -> Next | None:
        """Return the next run of the trial to promote now, or None (`PausingPolicy.next`)."""
        return promotion.following(self._ladder, trials, goal, self.waits, is_last=is_last, without=without)

    def waits(self, trial: Trial) -> bool:
        """Return whether a trial may be promoted later from its rung."""
        has_ended = self.budget is not None and trial.status == states.COMPLETED
        return trial.is_paused or (has_ended and self.last is not None and len(trial.curve) < self.last)

    def argument(self, rung: int) -> tuple[str, int] | None:
        """Return the argument (name, value) that ends the script at the next rung, or None."""
        end = self._ladder.above(rung)
        return (self.budget, end) if self.budget and end else None

    def told(self, trial: Trial, trials: Sequence[Trial], goal: Goal) -> str:
        """Return why a paused trial has not been promoted."""
        return promotion.left_behind(self._ladder, trial, trials, goal)

    @property
    def _ladder(self) -> Ladder:
        return Ladder(first=self.first * self.eta**self.bracket, eta=self.eta, last=self.last)


def _there(rung: int, trials: Sequence[Trial], goal: Goal) -> list[float]:
    bests = (trial.best(goal, rung) for trial in trials if len(trial.curve) >= rung)
    return sorted(cost(value, goal) for value in bests if value is not None)


@dataclass(frozen=True, kw_only=True)
class Hyperband(NamedPolicy):
    """A policy that assigns trials to several ASHA brackets by trial number.

    A bracket is an ASHA policy. Each further bracket starts one rung later, and gets 1 / eta as many trials.

    Args:
        last: Number of values that the script logs until it ends, which determines the number of brackets.
        first, eta: Number of logged values at the lowest rung; a rung keeps 1 / eta of its trials.

    Raises:
        SweepError: A number is out of range.

    Examples:
        >>> script = pl.Estimator(entry_script="train.py")
        >>> sweep = pl.Sweep(script, {"--lr": pl.uniform(0, 1)}, metric="loss", stop=pl.Hyperband(last=27))
    """

    NAME: ClassVar[str] = "hyperband"

    last: int
    first: int = 1
    eta: int = 3

    def __post_init__(self) -> None:
        # Check the values: the constructor of ASHA raises an error if they are invalid.
        ASHA(first=self.first, eta=self.eta, last=self.last)

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Return {trial number: reason} for trials to stop, compared within brackets."""
        brackets = self._brackets()
        reasons: dict[int, str] = {}
        for bracket in range(brackets):
            mine = [trial for trial in trials if self._bracket_of(trial.number, brackets) == bracket]
            reasons |= ASHA(first=self.first, eta=self.eta, last=self.last, bracket=bracket).stops(mine, goal)
        return reasons

    def _brackets(self) -> int:
        # Make one bracket for each rung below `last`. Each bracket skips one rung more than the bracket before it.
        return max(1, len(Ladder(first=self.first, eta=self.eta, last=self.last).up_to(self.last)))

    def _bracket_of(self, number: int, brackets: int) -> int:
        shares = [self.eta ** (brackets - 1 - bracket) for bracket in range(brackets)]
        place = number % sum(shares)
        for bracket, share in enumerate(shares):
            if place < share:
                return bracket
            place -= share
        raise AssertionError("the shares add up to more than any place")
