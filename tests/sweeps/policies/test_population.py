"""Population-based training, against tables worked by hand."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from paceline.errors import SweepError
from paceline.runs import states
from paceline.sweeps.expressions import (
    choice,
    lognormal,
    loguniform,
    normal,
    qlognormal,
    quniform,
    randint,
    uniform,
)
from paceline.sweeps.policies.policies import parse_policy, policy_from_json
from paceline.sweeps.policies.population import PopulationBasedTraining, explored
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


def test_population_trial_is_paused_after_each_generation_except_the_last() -> None:
    assert list(POLICY.judge(trials((0.1,), (0.2,) * 2, (0.3,) * 3), "maximize")) == [1, 2]
    gone_on = [dataclasses.replace(t, earlier=t.legs, begin=2) for t in trials((0.1,) * 3, (0.1,) * 4)]
    assert list(POLICY.judge(gone_on, "maximize")) == [1]
    last = [dataclasses.replace(t, earlier=t.legs * 2, begin=4) for t in trials((0.1,) * 6)]
    assert not POLICY.judge(last, "maximize")
    assert not POLICY.stops(trials((0.1,) * 6, (0.9,) * 6), "maximize")


def test_worst_trials_of_a_population_become_mutated_copies_of_the_best() -> None:
    # The last values are 0.5, 0.9, 0.1 (it was 0.95 before) and 0.4. A quarter of four trials is one trial.
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


def test_population_generation_starts_once_all_trials_have_finished_the_previous_one() -> None:
    there = population((0.5,) * 2, (0.9,) * 2, (0.1,), t2={"status": states.RUNNING})
    assert following(there) is None
    assert following(population((0.5,) * 2, (0.9,) * 2), is_last=False) is None
    # Trials 0 and 1 have begun the next generation. The policy decides on the other trials by the earlier results,
    # although later values exist.
    begun = all_following(population((0.5,) * 2, (0.9,) * 2, (0.1,) * 2, (0.2,) * 2))
    there = population((0.5,) * 2, (0.9,) * 2, (0.1,) * 2, (0.2,) * 2)
    for number in (0, 1):
        there[number] = dataclasses.replace(
            there[number].gone_on(f"s_{number}_2", begun[number], {}), status=states.FAILED, curve=(0.0,) * 4
        )
    assert {number: (one.source, one.chosen) for number, one in all_following(there).items()} == {
        number: (begun[number].source, begun[number].chosen) for number in (2, 3)
    }


def test_failed_and_nan_trials_of_a_population_are_replaced_by_copies_of_successful_ones() -> None:
    nan = float("nan")
    there = population((0.5,) * 2, (0.9,) * 2, (0.8,), (0.4, nan), t2={"status": states.FAILED})
    begun = all_following(there, policy=PopulationBasedTraining(interval=2, last=6, quantile=0.5))
    assert {number: one.source for number, one in begun.items()} == {
        **{0: "s_0", 1: "s_1"},
        **{number: begun[number].source for number in (2, 3)},
    }
    assert {begun[2].source, begun[3].source} <= {"s_0", "s_1"}
    assert "no finite number is number 4" in begun[3].why
    # If no trial has a finite value, failed trials stay failed and the others continue.
    nothing = population((nan,) * 2, (nan,) * 2, t0={"status": states.FAILED})
    assert {number: one.source for number, one in all_following(nothing).items()} == {1: "s_1"}
    # A trial that a user has canceled is left out.
    assert 0 not in all_following(population((0.1,) * 2, (0.2,) * 2, t0={"status": states.CANCELED}))


def test_population_trial_without_a_checkpoint_becomes_a_copy_of_another_trial() -> None:
    there = population((0.5,) * 2, (0.9,) * 2, (0.1,) * 2, (0.2,) * 2)
    policy = PopulationBasedTraining(interval=2, last=6, quantile=0.5)
    begun = all_following(there, policy=policy, without=frozenset({"s_1"}))
    assert {number: one.source for number, one in begun.items()} == {0: "s_0", 1: "s_0", 2: "s_0", 3: "s_0"}


def test_population_does_not_copy_trials_with_equal_results() -> None:
    assert {number: one.source for number, one in all_following(population((0.5,) * 2, (0.5,) * 2)).items()} == {
        **{0: "s_0", 1: "s_1"}
    }


@pytest.mark.promise("population-trains-step-worst-take")
def test_seed_determines_which_population_trials_are_copied_and_how_they_mutate() -> None:
    there = population(*((value / 10,) * 2 for value in range(8)))
    policy = PopulationBasedTraining(interval=2, last=6, quantile=0.5)
    one, two = (all_following(there, policy=policy, seed=3) for _ in range(2))
    assert one == two
    other = all_following(there, policy=policy, seed=4)
    assert [found.chosen for found in one.values()] != [found.chosen for found in other.values()]


def test_only_parameters_named_in_mutate_are_mutated() -> None:
    there = population((0.5,) * 2, (0.9,) * 2)
    begun = all_following(there, policy=PopulationBasedTraining(interval=2, last=6, mutate="--lr"))
    assert begun[0].source == "s_1"
    assert begun[0].chosen["layers"] == there[1].chosen["layers"]
    assert begun[0].chosen["lr"] != 0.1


def test_population_policy_gives_a_script_its_budget_argument_instead_of_stopping_the_script() -> None:
    policy = PopulationBasedTraining(interval=2, last=5, budget="--epochs")
    assert [policy.argument(rung) for rung in (0, 2, 4)] == [("--epochs", 2), ("--epochs", 4), ("--epochs", 5)]
    assert not policy.judge(trials((0.1,) * 2), "maximize")
    there = population((0.5,) * 2, (0.9,) * 2, t0={"status": states.COMPLETED}, t1={"status": states.COMPLETED})
    assert {number: one.source for number, one in all_following(there, policy=policy).items()} == {0: "s_1", 1: "s_1"}
    assert following(there) is None


def test_population_policy_is_parsed_from_text_and_equal_after_conversion_to_json_and_back() -> None:
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
def test_invalid_population_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SweepError, match="PBT"):
        PopulationBasedTraining(**{"interval": 2, "last": 6, **wrong})


def beside(expression: Any, value: Any, factor: float) -> Any:
    """Return the value that this factor makes of `value`, without new draws."""
    space = Space({"x": expression})
    found = explored(space, space.chosen({"x": value}), random.Random(1), factors=[factor], resample=0)
    return space.values(found)["x"]


@pytest.mark.promise("population-trains-step-worst-take")
@pytest.mark.parametrize(
    ("expression", "value", "down", "up"),
    [
        (loguniform(1e-4, 1), 0.01, 0.008, 0.012),
        (loguniform(1e-4, 1), 1, 0.8, 1),
        (uniform(0, 1), 0.5, 0.4, 0.6),
        # A factor would hardly move a value near 0. Instead the value moves by a fifth of half the width of the range.
        (uniform(-1, 1), 0.0, -0.2, 0.2),
        (uniform(-1, 1), -0.9, -1.0, -0.7),
        (randint(1, 100), 50, 40, 60),
        (randint(1, 5), 2, 1, 3),
        (randint(1, 5), 4, 3, 4),
        (randint(-10, 11), -3, -5, -1),
        (quniform(0, 1, 0.25), 0.5, 0.25, 0.75),
        (normal(10, 2), 10, 9.6, 10.4),
        (lognormal(0, 1), 1, 0.8, 1.2),
        (qlognormal(0, 1, 1), 3, 2, 4),
        (choice(32, 64, 128), 64, 32, 128),
        (choice(0.9, 0.5, 0.1), 0.5, 0.1, 0.9),
        (choice(32, 64), 64, 32, 64),
        (choice("only"), "only", "only", "only"),
        (3, 3, 3, 3),
    ],
    ids=str,
)
def test_each_expression_kind_is_perturbed_in_its_own_scale(expression: Any, value: Any, down: Any, up: Any) -> None:
    found = [beside(expression, value, factor) for factor in (0.8, 1.2)]
    assert found == ([pytest.approx(down), pytest.approx(up)] if isinstance(down, float) else [down, up])


def test_unordered_choice_mutates_to_other_options_uniformly() -> None:
    space = Space({"x": choice("relu", "gelu", "tanh")})
    found = [space.values(explored(space, {"x": 1}, random.Random(seed), resample=0))["x"] for seed in range(200)]
    assert set(found) == {"relu", "tanh"}
    assert 60 < found.count("relu") < 140


def test_resampled_value_covers_the_whole_space() -> None:
    space = Space({"x": uniform(0, 1)})
    found = [explored(space, {"x": 0.5}, random.Random(seed), resample=1)["x"] for seed in range(50)]
    assert len(set(found)) == 50
    assert min(found) < 0.2
    assert max(found) > 0.8


def test_mutation_keeps_the_chosen_branch_and_changes_its_values() -> None:
    space = Space({"opt": choice({"--momentum": uniform(0, 1)}, {"beta": uniform(0, 1)}), "lr": loguniform(0.01, 1)})
    before = space.chosen({"--momentum": 0.5, "lr": 0.1})
    for seed in range(20):
        after = space.values(explored(space, before, random.Random(seed)))
        assert set(after) == {"--momentum", "lr"}
    # `mutate` takes names with or without dashes. Other hyperparameters keep their values, but still draw random numbers.
    only = explored(space, before, random.Random(3), mutate=["momentum"])
    every = explored(space, before, random.Random(3))
    assert only["lr"] == before["lr"] != every["lr"]
    (inner,) = set(only) - {"lr", "opt"}
    assert only[inner] == every[inner] != 0.5


def test_seed_determines_the_mutated_parameter_values_of_a_trial() -> None:
    space = Space({"x": uniform(0, 1), "y": randint(1, 9)})
    one, two = (explored(space, {"x": 0.5, "y": 3}, random.Random(7)) for _ in range(2))
    assert one == two
