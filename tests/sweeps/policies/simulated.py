"""Sweeps without processes: policies over simulated curves, epoch by epoch, as a controller asks them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from paceline.runs import states
from paceline.sweeps.expressions import uniform
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial, ranked

#: A function of a trial's number and an epoch (from 1) that returns the loss.
Curves = Callable[[int, int], float]


def power_laws(seed: int, configurations: int = 100) -> Curves:
    """Losses that fall by a power law to a floor, with noise; many of them cross early."""
    source = random.Random(seed)
    shapes = [
        (source.uniform(0.3, 1.0), source.uniform(0.5, 1.0), source.uniform(0.5, 1.5)) for _ in range(configurations)
    ]

    def loss(number: int, epoch: int) -> float:
        floor, speed, height = shapes[number]
        return floor + height * epoch**-speed + random.Random(f"{seed}:{number}:{epoch}").gauss(0, 0.005)

    return loss


def best_without_policy(loss: Curves, configurations: int = 100, epochs: int = 81) -> float:
    return min(loss(number, epoch) for number in range(configurations) for epoch in range(1, epochs + 1))


def simulated(
    policy: Any, loss: Curves, *, configurations: int = 100, epochs: int = 81, workers: int = 8
) -> tuple[int, list[Trial]]:
    """Epochs spent, and the trials in the end."""
    space = Space({"x": uniform(0, 1)})
    waits = pausing(policy)
    trials: list[Trial] = []
    spent = 0

    def live() -> list[Trial]:
        return [trial for trial in trials if not trial.is_over]

    def change(number: int, **values: Any) -> None:
        trials[number] = dataclasses.replace(trials[number], **values)

    while True:
        while len(live()) < workers:
            is_last = len(trials) == configurations
            following = waits and waits.next(trials, "minimize", space, 0, is_last=is_last, without=frozenset())
            if following:
                trial = trials[following.number]
                run_id = f"s_{trial.number}_{len(trial.legs) + 1}"
                trials[trial.number] = trial.gone_on(run_id, following, {})
                change(trial.number, status=states.RUNNING)
            elif is_last:
                break
            else:
                number = len(trials)
                trials.append(Trial(number=number, run_id=f"s_{number}", chosen={"x": 0.5}, status=states.RUNNING))
        if not live():
            return spent, trials
        for trial in live():
            spent += 1
            curve = (*trial.curve, loss(trial.number, len(trial.curve) + 1))
            change(trial.number, curve=curve, status=states.COMPLETED if len(curve) == epochs else states.RUNNING)
        for number in policy.stops(trials, "minimize"):
            change(number, status=states.CANCELED)
        for number, verdict in waits.judge(trials, "minimize").items() if waits else ():
            if verdict.rung is None:
                change(number, status=states.CANCELED, paused=verdict.why)
            else:
                change(number, rung=verdict.rung)


def chosen(trials: list[Trial]) -> tuple[int, float]:
    """The best trial's number and loss."""
    found = ranked(trials, "minimize")[0]
    value = found.best("minimize")
    assert value is not None
    return found.number, value
