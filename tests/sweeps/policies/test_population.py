"""Population-based training, against tables worked by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.errors import SweepError
from paceline.runs import states
from paceline.sweeps.expressions import choice, loguniform
from paceline.sweeps.policies.policies import parse_policy, policy_from_json
from paceline.sweeps.policies.population import PopulationBasedTraining
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Next, Trial
from tests.sweeps.policies.curves import paused, trials

SPACE = Space({"lr": loguniform(1e-4, 1), "layers": choice(2, 4)})
POLICY = PopulationBasedTraining(interval=2, last=6, resample=0)


def population(*curves: tuple[float, ...], **others: Any) -> list[Trial]:
    found = paused(*curves, **others)
    return [dataclasses.replace(trial, chosen={"lr": 0.1, "layers": trial.number % 2}) for trial in found]


def following(
    found: list[Trial], policy: Any = POLICY, goal: Any = "maximize", seed: int = 0, **options: Any
) -> Next | None:
    return policy.next(found, goal, SPACE, seed, **{"is_last": True, "without": frozenset(), **options})


def all_following(found: list[Trial], **options: Any) -> dict[int, Next]:
    """The whole next generation, as a controller begins it."""
    found = list(found)
    begun: dict[int, Next] = {}
    while (one := following(found, **options)) is not None:
        begun[one.number] = one
        found[one.number] = dataclasses.replace(
            found[one.number].gone_on(f"s_{one.number}_2", one, {}), status=states.RUNNING
        )
    return begun


def test_a_trial_is_paused_at_the_end_of_its_generation_and_runs_to_the_end_in_the_last() -> None:
    assert list(POLICY.judge(trials((0.1,), (0.2,) * 2, (0.3,) * 3), "maximize")) == [1, 2]
    gone_on = [dataclasses.replace(t, earlier=t.legs, begin=2) for t in trials((0.1,) * 3, (0.1,) * 4)]
    assert list(POLICY.judge(gone_on, "maximize")) == [1]
    last = [dataclasses.replace(t, earlier=t.legs * 2, begin=4) for t in trials((0.1,) * 6)]
    assert not POLICY.judge(last, "maximize")
    assert not POLICY.stops(trials((0.1,) * 6, (0.9,) * 6), "maximize")


def test_the_worst_become_changed_copies_of_the_best_by_their_last_values() -> None:
    # The last values: 0.5, 0.9, 0.1 (which had 0.95 before), 0.4; a quarter of four is one.
    there = population((0.4, 0.5), (0.8, 0.9), (0.95, 0.1), (0.3, 0.4))
    begun = all_following(there)
    assert {number: one.source for number, one in begun.items()} == {0: "s_0", 1: "s_1", 2: "s_1", 3: "s_3"}
    assert begun[0].chosen == there[0].chosen
    assert begun[0].why == "PBT: goes on: 0.5 is number 2 of 4"
    assert begun[2].chosen["lr"] in (pytest.approx(0.08), pytest.approx(0.12))
    assert begun[2].why.startswith("PBT: a copy of trial 1, number 1 of 4 with 0.9, for 0.1 is number 4; ")
    assert all(one.rung == 2 for one in begun.values())
    down = all_following(population((0.4, -0.5), (0.8, 0.9), (0.9, -0.6), (0.3, 0.4)), goal="minimize")
    assert {number: one.source for number, one in down.items()} == {0: "s_0", 1: "s_2", 2: "s_2", 3: "s_3"}


def test_a_generation_begins_when_all_have_ended_theirs() -> None:
    there = population((0.5,) * 2, (0.9,) * 2, (0.1,), t2={"status": states.RUNNING})
    assert following(there) is None
    assert following(population((0.5,) * 2, (0.9,) * 2), is_last=False) is None
    # Some of it has begun: the others follow, by the same results, whatever those have come to.
    begun = all_following(population((0.5,) * 2, (0.9,) * 2, (0.1,) * 2, (0.2,) * 2))
    there = population((0.5,) * 2, (0.9,) * 2, (0.1,) * 2, (0.2,) * 2)
    for number in (0, 1):
        there[number] = dataclasses.replace(
            there[number].gone_on(f"s_{number}_2", begun[number], {}), status=states.FAILED, curve=(0.0,) * 4
        )
    assert {number: (one.source, one.chosen) for number, one in all_following(there).items()} == {
        number: (begun[number].source, begun[number].chosen) for number in (2, 3)
    }


def test_what_failed_and_what_has_no_number_is_the_worst_and_is_replaced() -> None:
    nan = float("nan")
    there = population((0.5,) * 2, (0.9,) * 2, (0.8,), (0.4, nan), t2={"status": states.FAILED})
    begun = all_following(there, policy=PopulationBasedTraining(interval=2, last=6, quantile=0.5))
    assert {number: one.source for number, one in begun.items()} == {
        **{0: "s_0", 1: "s_1"},
        **{number: begun[number].source for number in (2, 3)},
    }
    assert {begun[2].source, begun[3].source} <= {"s_0", "s_1"}
    assert "no finite number is number 4" in begun[3].why
    # Where nobody came to anything, the failed stay failed, and the others go on.
    nothing = population((nan,) * 2, (nan,) * 2, t0={"status": states.FAILED})
    assert {number: one.source for number, one in all_following(nothing).items()} == {1: "s_1"}
    # What was ended by hand is out of it.
    assert 0 not in all_following(population((0.1,) * 2, (0.2,) * 2, t0={"status": states.CANCELED}))


def test_what_left_no_checkpoint_is_no_source_and_takes_another_s() -> None:
    there = population((0.5,) * 2, (0.9,) * 2, (0.1,) * 2, (0.2,) * 2)
    policy = PopulationBasedTraining(interval=2, last=6, quantile=0.5)
    begun = all_following(there, policy=policy, without=frozenset({"s_1"}))
    assert {number: one.source for number, one in begun.items()} == {0: "s_0", 1: "s_0", 2: "s_0", 3: "s_0"}


def test_equal_ones_are_not_copied() -> None:
    assert {number: one.source for number, one in all_following(population((0.5,) * 2, (0.5,) * 2)).items()} == {
        **{0: "s_0", 1: "s_1"}
    }


def test_the_seed_says_what_is_copied_and_how_it_is_changed() -> None:
    there = population(*((value / 10,) * 2 for value in range(8)))
    policy = PopulationBasedTraining(interval=2, last=6, quantile=0.5)
    one, two = (all_following(there, policy=policy, seed=3) for _ in range(2))
    assert one == two
    other = all_following(there, policy=policy, seed=4)
    assert [found.chosen for found in one.values()] != [found.chosen for found in other.values()]


def test_only_what_is_named_changes() -> None:
    there = population((0.5,) * 2, (0.9,) * 2)
    begun = all_following(there, policy=PopulationBasedTraining(interval=2, last=6, mutate="--lr"))
    assert begun[0].source == "s_1"
    assert begun[0].chosen["layers"] == there[1].chosen["layers"]
    assert begun[0].chosen["lr"] != 0.1


def test_a_script_that_knows_its_budget_ends_by_itself() -> None:
    policy = PopulationBasedTraining(interval=2, last=5, budget="--epochs")
    assert [policy.argument(rung) for rung in (0, 2, 4)] == [("--epochs", 2), ("--epochs", 4), ("--epochs", 5)]
    assert not policy.judge(trials((0.1,) * 2), "maximize")
    there = population((0.5,) * 2, (0.9,) * 2, t0={"status": states.COMPLETED}, t1={"status": states.COMPLETED})
    assert {number: one.source for number, one in all_following(there, policy=policy).items()} == {0: "s_1", 1: "s_1"}
    assert following(there) is None


def test_it_is_written_as_text_and_as_json() -> None:
    policy = parse_policy('pbt(interval=5, last=50, factors=[0.5, 2], mutate=["lr"])')
    assert policy == PopulationBasedTraining(interval=5, last=50, factors=[0.5, 2], mutate=["lr"])
    assert policy_from_json(policy.to_json()) == policy


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0},
        {"last": 1},
        {"quantile": 0.6},
        {"quantile": True},
        {"resample": 2},
        {"factors": [0]},
        {"factors": "0.8"},
        {"mutate": [1]},
        {"budget": "a b"},
    ],
    ids=str,
)
def test_wrong_parameters_are_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(SweepError, match="PBT"):
        PopulationBasedTraining(**{"interval": 2, "last": 6, **wrong})
