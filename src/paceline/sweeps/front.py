"""The best of several metrics: the trials to which no other is better in all of them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sweeps.trial import Goal, Trial, cost, ranked


def front(trials: Sequence[Trial], goals: Sequence[Goal]) -> list[Trial]:
    """The Pareto front, the best by the first metric first: those that no other trial beats or equals in each metric and beats in
    one. A trial counts by its last values (`Trial.last`); one without them is on no front.
    """
    known = [(tuple(map(cost, values, goals)), trial) for trial in trials if (values := _values(trial, goals))]
    found: list[tuple[tuple[float, ...], Trial]] = []
    # In this order nothing is beaten by what comes after it, so that each is held against the front alone.
    for key, trial in sorted(known, key=lambda one: (one[0], one[1].number)):
        if not any(_beats(other, key) for other, _ in found):
            found.append((key, trial))
    return [trial for _, trial in found]


def ordered(trials: Sequence[Trial], goals: Sequence[Goal]) -> list[Trial]:
    """The trials, the best first: by its best values; with several metrics the front, then the others by the first."""
    if len(goals) == 1:
        return ranked(trials, goals[0])
    first = front(trials, goals)
    on_front = {trial.number for trial in first}

    def key(trial: Trial) -> tuple[float, int]:
        values = _values(trial, goals)
        return cost(values[0] if values else None, goals[0]), trial.number

    return first + sorted((trial for trial in trials if trial.number not in on_front), key=key)


def _values(trial: Trial, goals: Sequence[Goal]) -> tuple[float, ...]:
    # One that has just begun has no curves yet.
    return trial.last if trial.last and len(trial.last) == len(goals) else ()


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
