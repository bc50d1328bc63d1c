"""What a policy is, and how all of them count.

An interval is one logging of the primary metric by the script. A policy judges a trial at intervals that are multiples of
evaluation_interval and at least delay_evaluation, as the Azure SDK's do. A trial is judged at the last such interval that it has
reached, each time that anything new is known: a better curve that comes later is held against those that run as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from paceline.errors import SweepError
from paceline.sweeps.trial import Goal, Trial


@runtime_checkable
class Policy(Protocol):
    """Judges trials while they run."""

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Trial number -> why it is to be stopped, of those that run. trials: all of the sweep."""

    def to_json(self) -> dict[str, Any]:
        """`{"name": ..., parameter: ...}`."""


def judged_at(trial: Trial, evaluation_interval: int, delay_evaluation: int) -> int | None:
    """The interval at which a trial is judged now; None where it is not judged: it is over, or has not come so far."""
    # A trial that has logged nothing is not judged even with a delay of 0: there is nothing to judge.
    last = len(trial.curve) // evaluation_interval * evaluation_interval
    return last if not trial.is_over and last and last >= delay_evaluation else None


def judged(
    trials: Sequence[Trial], goal: Goal, evaluation_interval: int, delay_evaluation: int
) -> Iterator[tuple[Trial, int, float]]:
    """The trials that are judged now: each with its interval, and with its best value by then. One without any runs on."""
    for trial in trials:
        interval = judged_at(trial, evaluation_interval, delay_evaluation)
        if interval is not None and (own := trial.best(goal, interval)) is not None:
            yield trial, interval, own


def check_intervals(policy: str, evaluation_interval: int, delay_evaluation: int) -> None:
    """Raises:
    SweepError: a number of intervals that can't be.
    """
    check_whole(policy, "evaluation_interval", evaluation_interval, at_least=1)
    check_whole(policy, "delay_evaluation", delay_evaluation, at_least=0)


def check_whole(policy: str, name: str, value: object, *, at_least: int) -> None:
    """Raises:
    SweepError: the value is no integer, or is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise SweepError(f"{policy}: {name}={value!r} is no integer of {at_least} or more.")
