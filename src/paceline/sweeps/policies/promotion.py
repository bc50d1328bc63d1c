"""Promotion between the rungs of successive halving.

    rung  27                                             a trial is paused when it reaches a rung, unless it is
           9            *                                among the best floor(n / eta) of the n trials there
           3   * . * . . * . . .       * promoted        free places go to the top rung first, then to new trials

Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.runs import states
from paceline.sweeps.policies.pausing import TO_ITS_END, Judgement
from paceline.sweeps.trial import Goal, Next, Trial, cost


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rungs of successive halving: first, first * eta, ... below `last`."""

    first: int
    eta: int
    last: int | None

    def reached(self, trial: Trial) -> int:
        """Return the highest rung that a trial has reached, or 0."""
        return max(self.up_to(len(trial.curve)), default=0)

    def up_to(self, count: int) -> list[int]:
        rungs, rung = [], self.first
        while rung <= count and (self.last is None or rung < self.last):
            rungs.append(rung)
            rung *= self.eta
        return rungs

    def above(self, rung: int) -> int | None:
        """Return the rung above `rung`, at most `last`; None means no limit."""
        if rung >= TO_ITS_END:
            return self.last
        rung_above = self.first
        while rung_above <= rung:
            rung_above *= self.eta
        return rung_above if self.last is None else min(rung_above, self.last)


def judge(ladder: Ladder, trials: Sequence[Trial], goal: Goal) -> dict[int, Judgement]:
    """Return {trial number: decision} for live trials that reached a new rung."""
    judgements: dict[int, Judgement] = {}
    known = {trial.number: trial for trial in trials}
    # Judge the best trial first, because promotions are limited: a worse trial must not take the last promotion.
    for trial in sorted(trials, key=lambda trial: _order(trial, ladder.reached(trial), goal)):
        rung = ladder.reached(trial)
        if trial.is_over or rung <= trial.rung:
            continue
        there = _ranked(list(known.values()), rung, goal)
        keep = len(there) // ladder.eta
        said = _said(trial, rung, goal)
        is_among = any(other.number == trial.number for other in there[:keep])
        # Don't pause a trial that would be promoted at once, so that it keeps its nodes.
        if is_among and _promoted(ladder, there, rung) < keep:
            judgements[trial.number] = Judgement(
                rung=rung, why=f"ASHA: {said} is among the best {keep} of {len(there)}"
            )
            known[trial.number] = dataclasses.replace(trial, rung=rung)
        else:
            why = f"is among the best {keep}" if is_among else f"is not among the best {keep}"
            taken = ", whose places are taken" if is_among else ""
            judgements[trial.number] = Judgement(why=f"ASHA: {said} {why} of {len(there)} so far{taken}")
    return judgements


def following(
    ladder: Ladder,
    trials: Sequence[Trial],
    goal: Goal,
    waits: Callable[[Trial], bool],
    *,
    is_last: bool,
    without: frozenset[str],
) -> Next | None:
    """Return the next run of the trial to promote, or None.

    The ASHA paper promotes every trial that is among the best at the moment. So more than 1 / eta of the trials
    continue if better trials come later. Here, a rung promotes at most 1 / eta of its trials while more trials may
    reach it. After that, the rung also promotes the other trials that are among its best 1 / eta.

    When no other run can begin, the best waiting trial runs to its end, unless another trial has completed. So a sweep
    ends with a trained model, even with fewer than eta trials at a rung.
    `is_last`: Whether no new trial will begin. `without`: Ids of runs that have left no checkpoint.
    """
    usable = [trial for trial in trials if trial.run_id not in without]
    rungs = ladder.up_to(max((len(trial.curve) for trial in usable), default=0))
    for rung in reversed(rungs):
        there = _ranked(usable, rung, goal)
        if _promoted(ladder, there, rung) < len(there) // ladder.eta and (
            promoted := _promotable(ladder, there, rung, goal, waits)
        ):
            return promoted
    if not is_last:
        return None
    for rung in rungs:
        # Wait for a live trial that has not reached this rung: its result at the rung may change which trials are the best.
        if any(not trial.is_over and trial.rung < rung for trial in trials):
            return None
        if promoted := _promotable(ladder, _ranked(usable, rung, goal), rung, goal, waits):
            return promoted
    if any(not trial.is_over or (trial.status == states.COMPLETED and not waits(trial)) for trial in trials):
        return None
    waiting = [trial for trial in usable if waits(trial) and ladder.reached(trial) > trial.rung]
    top = max((ladder.reached(trial) for trial in waiting), default=0)
    for trial in _ranked([trial for trial in waiting if ladder.reached(trial) == top], top, goal):
        why = f"ASHA: goes on to its end: {_said(trial, top, goal)} is the best of the highest rung"
        return Next(number=trial.number, source=trial.run_id, chosen=trial.chosen, rung=TO_ITS_END, why=why)
    return None


def _promotable(
    ladder: Ladder, there: Sequence[Trial], rung: int, goal: Goal, waits: Callable[[Trial], bool]
) -> Next | None:
    keep = len(there) // ladder.eta
    for trial in there[:keep]:
        if waits(trial) and ladder.reached(trial) == rung and trial.rung < rung:
            why = f"ASHA: {_said(trial, rung, goal)} is among the best {keep} of {len(there)}"
            return Next(number=trial.number, source=trial.run_id, chosen=trial.chosen, rung=rung, why=why)
    return None


def _promoted(ladder: Ladder, there: Sequence[Trial], rung: int) -> int:
    return sum(trial.rung >= rung or ladder.reached(trial) > rung for trial in there)


def left_behind(ladder: Ladder, trial: Trial, trials: Sequence[Trial], goal: Goal) -> str:
    """Return why a paused trial has not been promoted, as a sentence."""
    rung = ladder.reached(trial)
    there = _ranked(trials, rung, goal)
    return (
        f"ASHA: {_said(trial, rung, goal)} is not among the best {len(there) // ladder.eta} of {len(there)} "
        f"that came so far"
    )


def _ranked(trials: Sequence[Trial], rung: int, goal: Goal) -> list[Trial]:
    """Return the trials with a value at the rung, best first.

    Failed trials and trials that a user has canceled do not count.
    """
    there = [
        trial for trial in trials if len(trial.curve) >= rung and _counts(trial) and trial.best(goal, rung) is not None
    ]
    return sorted(there, key=lambda trial: _order(trial, rung, goal))


def _order(trial: Trial, rung: int, goal: Goal) -> tuple[float, int]:
    return cost(trial.best(goal, rung), goal), trial.number


def _counts(trial: Trial) -> bool:
    return trial.status == states.COMPLETED or trial.is_paused or not trial.is_over


def _said(trial: Trial, rung: int, goal: Goal) -> str:
    value = trial.best(goal, rung)
    best = "no finite number" if value is None else f"its best of {value:g}"
    return f"{best} after {rung} values"
