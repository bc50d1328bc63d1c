"""Asynchronous successive halving, and Hyperband's brackets of it.

Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020; Li et al., Hyperband, JMLR 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import SweepError
from paceline.runs import states
from paceline.sweeps.policies import promotion
from paceline.sweeps.policies.pausing import Judgement, check_budget
from paceline.sweeps.policies.policy import check_whole
from paceline.sweeps.policies.promotion import Ladder
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Goal, Next, Trial, cost


@dataclass(frozen=True, kw_only=True)
class ASHA:
    """Stops a trial that, where it comes to a rung, is not among the best 1 / eta of those that have come there; with promote,
    pauses it, and goes on with it from its checkpoints once it is among them.

        rungs  first, first * eta, first * eta^2, ... below last        first 3, eta 3, last 81:  3  9  27

    first: the interval of the first rung; a rung of 1 picks wrongly where curves cross early. eta: 2 or more.
    last: trials end by themselves after so many intervals; None where that is not known.
    bracket: so many rungs are left out at the beginning, as in Hyperband's brackets.
    promote: needs a script that goes on from what it finds in `PACELINE_CHECKPOINT_DIR`.
    budget: with promote, name of the script's argument, such as "--epochs", that says after how many values in all it ends: each
        run then ends by itself at its rung, and nothing is trained in vain. Needs last.

    Raises:
        SweepError: numbers that can't be; a budget without promote or without last.
    """

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
            raise SweepError(
                f"ASHA: budget={self.budget!r} needs promote=True: only then does a trial go on after its end."
            )
        check_budget("ASHA", self.budget, self.last)

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Trial number -> why it is to be stopped."""
        found: dict[int, str] = {}
        rungs: dict[int, list[float]] = {}
        for trial in trials:
            if trial.is_over or self.promote:
                continue
            # Every rung again and not the last alone: better trials that came later may have pushed it out of an early one.
            for rung in self._ladder.up_to(len(trial.curve)):
                if rung not in rungs:
                    rungs[rung] = _there(rung, trials, goal)
                if reason := self._behind(trial, rung, rungs[rung], goal):
                    found[trial.number] = reason
                    break
        return found

    def _behind(self, trial: Trial, rung: int, there: Sequence[float], goal: Goal) -> str | None:
        own = trial.best(goal, rung)
        # The paper promotes the best floor(n / eta); with fewer than eta results nobody can be told from the best.
        keep = len(there) // self.eta
        # A trial whose values so far are all NaN or infinite is not held against others and runs on.
        if own is None or not keep or cost(own, goal) <= there[keep - 1]:
            return None
        return (
            f"ASHA: its best of {own:g} after {rung} values is not among the best {keep} of {len(there)} trials "
            f"that came so far"
        )

    @property
    def pauses(self) -> bool:
        """Whether trials wait for others at rungs; without `promote` they only stop."""
        return self.promote

    def judge(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, Judgement]:
        """Trial number -> whether it waits at its rung or goes on beyond it. None where the script knows its budget."""
        return {} if self.budget else promotion.judge(self._ladder, trials, goal)

    def next(
        self, trials: Sequence[Trial], goal: Goal, space: Space, seed: int, *, is_last: bool, without: frozenset[str]
    ) -> Next | None:
        """The trial that is promoted next, from the top rung down."""
        return promotion.following(self._ladder, trials, goal, self.waits, is_last=is_last, without=without)

    def waits(self, trial: Trial) -> bool:
        """Whether it may be promoted yet: it was paused, or has ended by itself where its budget was."""
        has_ended = self.budget is not None and trial.status == states.COMPLETED
        return trial.is_paused or (has_ended and self.last is not None and len(trial.curve) < self.last)

    def argument(self, rung: int) -> tuple[str, int] | None:
        """Name and value of the argument that tells its end to a run that goes on behind `rung`; None without `budget`."""
        end = self._ladder.above(rung)
        return (self.budget, end) if self.budget and end else None

    def told(self, trial: Trial, trials: Sequence[Trial], goal: Goal) -> str:
        """Why a trial that waits was not gone on with, for its record at the sweep's end."""
        return promotion.left_behind(self._ladder, trial, trials, goal)

    @property
    def _ladder(self) -> Ladder:
        return Ladder(first=self.first * self.eta**self.bracket, eta=self.eta, last=self.last)

    def to_json(self) -> dict[str, Any]:
        """`{"name": ..., parameter: ...}`."""
        return {"name": "asha", **asdict(self)}


def _there(rung: int, trials: Sequence[Trial], goal: Goal) -> list[float]:
    """What the bests of all trials that came to a rung cost, the best first."""
    bests = (trial.best(goal, rung) for trial in trials if len(trial.curve) >= rung)
    return sorted(cost(value, goal) for value in bests if value is not None)


@dataclass(frozen=True, kw_only=True)
class Hyperband:
    """Hyperband's brackets of ASHA, dealt out by the trial's number: some trials get more time before they are judged.

    first, eta, last: as ASHA's; last is needed, for it sets the number of brackets (Li et al., Hyperband, JMLR 2018).
    A bracket that starts one rung later gets 1 / eta as many trials.

    Raises:
        SweepError: numbers that can't be.
    """

    last: int
    first: int = 1
    eta: int = 3

    def __post_init__(self) -> None:
        # Made for its checks alone: the numbers' rules are the same.
        ASHA(first=self.first, eta=self.eta, last=self.last)

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Trial number -> why it is to be stopped; each is held against those of its own bracket."""
        brackets = self._brackets()
        found: dict[int, str] = {}
        for bracket in range(brackets):
            mine = [trial for trial in trials if self._bracket_of(trial.number, brackets) == bracket]
            found |= ASHA(first=self.first, eta=self.eta, last=self.last, bracket=bracket).stops(mine, goal)
        return found

    def _brackets(self) -> int:
        # As many brackets as rungs lie below last: a further one would have no rung to judge at.
        return max(1, len(Ladder(first=self.first, eta=self.eta, last=self.last).up_to(self.last)))

    def _bracket_of(self, number: int, brackets: int) -> int:
        shares = [self.eta ** (brackets - 1 - bracket) for bracket in range(brackets)]
        place = number % sum(shares)
        for bracket, share in enumerate(shares):
            if place < share:
                return bracket
            place -= share
        raise AssertionError("the shares add up to more than any place")

    def to_json(self) -> dict[str, Any]:
        """`{"name": ..., parameter: ...}`."""
        return {"name": "hyperband", **asdict(self)}
