"""Asynchronous successive halving and Hyperband's brackets, against tables worked by hand and simulated curves."""

from __future__ import annotations

import random

from paceline.runs import states
from paceline.sweeps.policies.asha import ASHA, Hyperband
from paceline.sweeps.trial import Trial, ranked
from tests.sweeps.policies.curves import trials


def test_asha_continues_the_best_fraction_at_each_rung() -> None:
    curves = trials((0.1,) * 3, (0.2,) * 3, (0.3,) * 3, (0.4,) * 2)
    found = ASHA(first=3, eta=3).stops(curves, "maximize")
    assert list(found) == [0, 1]  # only the best 1 of 3 continues; trial 3 has not reached the rung
    assert "best 1 of 3" in found[0]
    assert list(ASHA(first=3, eta=3).stops(curves, "minimize")) == [1, 2]


def test_asha_stops_no_trial_while_fewer_than_eta_results_exist() -> None:
    assert not ASHA(first=1, eta=3).stops(trials((0.1,), (0.9,)), "maximize")


def test_asha_has_no_rung_at_the_last_interval() -> None:
    curves = trials((0.1,) * 9, (0.2,) * 9, (0.3,) * 9, over=(1, 2))
    assert ASHA(first=3, eta=3, last=10).stops(curves, "maximize")
    assert not ASHA(first=9, eta=3, last=9).stops(curves, "maximize")


def test_hyperband_assigns_brackets_by_trial_number_and_judges_them_separately() -> None:
    policy = Hyperband(last=9, first=1, eta=3)
    # There are two brackets: trials 0 to 2 are judged from epoch 1 on, and trial 3 from epoch 3 on.
    curves = trials((0.1,), (0.2,), (0.3,), (0.0,))
    assert list(policy.stops(curves, "maximize")) == [0, 1]


def test_asha_finds_a_good_trial_with_a_fraction_of_the_epochs() -> None:
    """100 configurations of 81 epochs, 8 at a time; losses fall by a power law, with noise, and cross early."""
    source = random.Random(5)
    shapes = [(source.uniform(0.2, 1.0), source.uniform(0.6, 0.8), source.uniform(1.0, 1.4)) for _ in range(100)]

    def loss(number: int, epoch: int) -> float:
        floor, speed, height = shapes[number]
        noise = random.Random(number * 1000 + epoch).gauss(0, 0.005)
        return floor + height * epoch**-speed + noise

    policy = ASHA(first=3, eta=3, last=81)
    known: list[Trial] = []
    waiting = list(range(100))
    spent = 0
    while waiting or any(not trial.is_over for trial in known):
        while waiting and sum(not trial.is_over for trial in known) < 8:
            known.append(Trial(number=(n := waiting.pop(0)), run_id=f"s_{n}", status=states.RUNNING))
        for place, trial in enumerate(known):
            if trial.is_over:
                continue
            spent += 1
            curve = (*trial.curve, loss(trial.number, len(trial.curve) + 1))
            status = states.COMPLETED if len(curve) == 81 else states.RUNNING
            known[place] = Trial(number=trial.number, run_id=trial.run_id, status=status, curve=curve)
        for number in policy.stops(known, "minimize"):
            stopped = known[number]
            known[number] = Trial(number=number, run_id=stopped.run_id, status=states.CANCELED, curve=stopped.curve)
    best = min(min(loss(n, epoch) for epoch in range(1, 82)) for n in range(100))
    found = ranked(known, "minimize")[0].best("minimize")
    assert found is not None
    assert found <= best + 0.01  # 0.01 is two standard deviations of the noise
    assert spent <= 0.15 * 100 * 81
