"""ASHA that pauses and promotes, against tables worked by hand and simulated curves."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest

from paceline.errors import SweepError
from paceline.runs import states
from paceline.sweeps.expressions import uniform
from paceline.sweeps.policies.asha import ASHA
from paceline.sweeps.policies.pausing import TO_ITS_END, pausing
from paceline.sweeps.policies.policies import parse_policy, policy_from_json
from paceline.sweeps.policies.policy import Bandit
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Next, Trial
from tests.sweeps.policies.curves import paused, trials
from tests.sweeps.policies.simulated import best_without_policy, chosen, power_laws, simulated

SPACE = Space({"x": uniform(0, 1)})
POLICY = ASHA(first=3, eta=3, last=81, promote=True)


def following(found: list[Trial], policy: ASHA = POLICY, goal: Any = "maximize", **options: Any) -> Next | None:
    return policy.next(found, goal, SPACE, 0, **{"is_last": False, "without": frozenset(), **options})


def test_asha_promotion_continues_the_best_fraction_and_pauses_the_others() -> None:
    found = POLICY.judge(trials((0.1,) * 3, (0.2,) * 3, (0.3,) * 3, (0.4,) * 2), "maximize")
    assert {number: verdict.rung for number, verdict in found.items()} == {0: None, 1: None, 2: 3}
    assert found[0].why == "ASHA: its best of 0.1 after 3 values is not among the best 1 of 3 so far"
    assert found[2].why == "ASHA: its best of 0.3 after 3 values is among the best 1 of 3"
    down = POLICY.judge(trials((-0.1,) * 3, (-0.2,) * 3, (-0.3,) * 3), "minimize")
    assert [number for number, verdict in down.items() if verdict.rung] == [2]
    # After two results, the best of three is not known yet.
    assert [verdict.rung for verdict in POLICY.judge(trials((0.1,) * 3, (0.2,) * 3), "maximize").values()] == [None] * 2
    assert not ASHA(promote=True).stops(trials((0.1,) * 3, (0.2,) * 3, (0.3,) * 3), "maximize")


def test_promoted_trial_is_judged_at_the_next_rung() -> None:
    found = [dataclasses.replace(trial, rung=3) for trial in trials((0.3,) * 8, (0.2,) * 9)]
    assert {number: verdict.rung for number, verdict in POLICY.judge(found, "maximize").items()} == {1: None}


@pytest.mark.promise("trial-paused-rung-goes-checkpoints")
def test_trial_is_promoted_once_enough_results_exist() -> None:
    assert following(paused((0.1,) * 3, (0.3,) * 3)) is None
    found = following(paused((0.1,) * 3, (0.3,) * 3, (0.2,) * 3))
    assert found == Next(
        number=1,
        source="s_1",
        chosen={"x": 0.1},
        rung=3,
        why="ASHA: its best of 0.3 after 3 values is among the best 1 of 3",
    )
    assert following(paused((0.1,) * 3, (0.3,) * 3, (0.2,) * 3), goal="minimize").number == 0
    # Only one of three trials may be promoted from rung 3. Here the promoted trial already runs, or already waits at
    # the next rung.
    assert following(paused((0.1,) * 3, (0.3,) * 3, (0.2,) * 3, t2={"status": states.RUNNING, "rung": 3})) is None
    assert following(paused((0.1,) * 3, (0.3,) * 3, (0.2,) * 9)) is None
    # Six trials have reached rung 3, so two of them may be promoted.
    assert following(paused((0.1,) * 3, (0.3,) * 3, (0.2,) * 9, *((0.0,) * 3,) * 3)).number == 1


def test_promotion_from_the_top_rung_has_priority() -> None:
    there = [(0.5,) * 9, (0.4,) * 9, (0.3,) * 9, (0.9,) * 3, *((0.1,) * 3,) * 8]
    found = following(paused(*there))
    assert (found.number, found.rung) == (0, 9)


def test_failed_canceled_and_nan_trials_are_not_promoted() -> None:
    nan = float("nan")
    curves = (0.9,) * 3, (0.8,) * 3, (nan,) * 3, (0.3,) * 3, (0.2,) * 3
    gone = {"t0": {"status": states.FAILED}, "t1": {"status": states.CANCELED}}
    assert following(paused(*curves, **gone)) is None
    assert following(paused(*curves, (0.1,) * 3, **gone)).number == 3
    # A trial that left no checkpoint can't continue, so the next best trial is promoted.
    assert following(paused(*curves[3:], (0.1,) * 3, (0.0,) * 3), without=frozenset({"s_0"})).number == 1


@pytest.mark.promise("trial-paused-rung-goes-checkpoints")
def test_next_best_paused_trials_are_promoted_once_no_further_trial_can_reach_the_rung() -> None:
    # Trial 0 was promoted from rung 3 when it was the best of three. The better trial 3 came later.
    there = paused((0.5,) * 9, (0.1,) * 3, (0.2,) * 3, (0.9,) * 3, (0.3,) * 3)
    assert following(there) is None
    assert following(there, is_last=True).number == 3
    there[4] = dataclasses.replace(there[4], status=states.RUNNING, paused=None, curve=(0.3,))
    assert following(there, is_last=True) is None


def test_best_paused_trial_is_resumed_to_its_end_if_too_few_trials_exist_for_a_promotion() -> None:
    there = paused((0.5,) * 3, (0.9,) * 3)
    found = following(there, is_last=True)
    assert (found.number, found.rung) == (1, TO_ITS_END)
    assert "goes on to its end" in found.why
    ended = paused((0.5,) * 3, (0.4,) * 81, t1={"status": states.COMPLETED})
    assert following(ended, is_last=True) is None
    assert following(there, is_last=True, without=frozenset({"s_0", "s_1"})) is None
    assert POLICY.told(there[0], there, "maximize").endswith("is not among the best 0 of 2 that came so far")


def test_asha_does_not_stop_a_script_with_a_budget_argument() -> None:
    policy = ASHA(first=3, eta=3, last=81, promote=True, budget="--epochs")
    assert not policy.judge(trials((0.1,) * 3, (0.2,) * 3, (0.3,) * 3), "maximize")
    assert [policy.argument(rung) for rung in (0, 3, 27, TO_ITS_END)] == [
        *(("--epochs", 3), ("--epochs", 9), ("--epochs", 81), ("--epochs", 81)),
    ]
    ended = trials((0.1,) * 3, (0.3,) * 3, (0.2,) * 3, over=(0, 1, 2))
    assert following(ended, policy).number == 1
    assert following(ended, POLICY) is None
    assert not policy.waits(trials((0.1,) * 81, over=(0,))[0])
    # The rungs are at 3, 9 and 27 epochs. Because last=20 is less than 27, a trial continues from epoch 9 to epoch 20.
    assert ASHA(first=3, last=20, promote=True, budget="-n").argument(9) == ("-n", 20)


def test_invalid_promotion_policies_are_refused() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "promote='yes'": {"promote": "yes"},
        "needs promote=True": {"budget": "--epochs", "last": 9},
        "needs last": {"budget": "--epochs", "promote": True},
        "is not an argument of the script": {"budget": "--my epochs", "promote": True, "last": 9},
    }
    for message, values in wrong.items():
        with pytest.raises(SweepError, match=message):
            ASHA(**values)
    with pytest.raises(SweepError, match="is a hyperparameter of the space as well"):
        SweepSpec(space=SPACE, metric="score", stop=ASHA(promote=True, last=9, budget="--x"))


def test_promotion_policy_is_parsed_from_text_and_equal_after_conversion_to_json_and_back() -> None:
    policy = parse_policy("asha(first=2, eta=2, last=12, promote=true, budget=--epochs)")
    assert policy == ASHA(first=2, eta=2, last=12, promote=True, budget="--epochs")
    assert policy_from_json(policy.to_json()) == policy
    assert pausing(policy) is policy
    assert pausing(ASHA()) is pausing(Bandit(slack_factor=0.1)) is None


@pytest.mark.promise("asha-promotion-finds-best-simulated")
def test_simulated_promotion_finds_the_best_with_15_percent_of_the_epochs() -> None:
    """100 configurations of 81 epochs, 8 at a time, 5 seeds; `benchmarks/sweep_asha.py` takes more."""
    spent = []
    for seed in range(5):
        loss = power_laws(seed)
        epochs, found = simulated(POLICY, loss)
        assert chosen(found)[1] == best_without_policy(loss), seed
        # All trials have ended, so no promoted trial still waits for its continuation.
        assert all(trial.is_over for trial in found)
        spent.append(epochs / 8100)
    assert max(spent) <= 0.15
    assert statistics.fmean(spent) <= 0.13
    assert simulated(Bandit(slack_factor=0.15, delay_evaluation=5), power_laws(0))[0] <= 0.2 * 8100
