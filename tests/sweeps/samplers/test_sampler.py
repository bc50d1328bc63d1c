"""Random points: seeded, without repeats where a space has an end."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.errors import SweepError
from paceline.sweeps.samplers.sampler import GridSampler, RandomSampler
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial

SPACE = Space({"lr": pl.loguniform(1e-4, 1e-1), "n": pl.randint(10)})


@pytest.mark.promise("study-made-anew-proposes-unbroken")
def test_random_proposal_depends_only_on_seed_and_number() -> None:
    one = RandomSampler(SPACE, 3)
    points = [one.propose(number, ()) for number in range(20)]
    assert [RandomSampler(SPACE, 3).propose(number, ()) for number in reversed(range(20))] == points[::-1]
    assert RandomSampler(SPACE, 4).propose(0, ()) != points[0]
    assert len({str(point) for point in points}) == 20


@pytest.mark.promise("point-comes-twice-space-end")
def test_small_space_is_proposed_without_repeats() -> None:
    space = Space({"a": pl.choice(1, 2, 3), "b": pl.choice({"c": pl.choice(4, 5)}, {})})
    sampler = RandomSampler(space, 0)
    trials: list[Trial] = []
    while (proposal := sampler.propose(len(trials), trials)) is not None:
        trials.append(Trial(number=len(trials), run_id="", chosen=proposal.chosen))
    assert len({str(trial.chosen) for trial in trials}) == len(trials) == space.size == 9


def test_sampler_repeats_points_on_request() -> None:
    space = Space({"a": pl.choice(1, 2)})
    sampler = RandomSampler(space, 0, repeats=True)
    points = [sampler.propose(number, ()) for number in range(20)]
    assert {str(point.chosen) for point in points if point} == {"{'a': 0}", "{'a': 1}"}


def test_quantized_values_are_proposed_without_repeats() -> None:
    space = Space({"a": pl.quniform(0, 1, 0.5)})
    sampler = RandomSampler(space, 0)
    trials: list[Trial] = []
    while (proposal := sampler.propose(len(trials), trials)) is not None:
        trials.append(Trial(number=len(trials), run_id="", chosen=proposal.chosen))
    assert sorted(space.values(trial.chosen)["a"] for trial in trials) == [0, 0.5, 1]


def test_grid_points_are_proposed_by_trial_number() -> None:
    space = Space({"a": pl.choice(1, 2), "b": pl.choice("x", "y")})
    sampler = GridSampler(space)
    found = [sampler.propose(number, ()) for number in range(5)]
    assert [space.values(proposal.chosen) for proposal in found[:4] if proposal] == [
        *({"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}),
    ]
    assert found[4] is None
    assert GridSampler(space).propose(2, ()) == found[2]


def test_grid_sampler_does_not_repeat_initial_points_given_by_the_user() -> None:
    space = Space({"a": pl.choice(1, 2, 3)})
    sampler = GridSampler(space, [space.chosen({"a": 2})])
    found = [sampler.propose(number, ()) for number in range(1, 4)]
    assert [space.values(proposal.chosen)["a"] for proposal in found[:2] if proposal] == [1, 3]
    assert found[2] is None


def test_large_grid_is_computed_lazily() -> None:
    space = Space({name: pl.randint(1000) for name in "abcdef"})
    proposal = GridSampler(space).propose(3, ())
    assert proposal is not None
    assert proposal.chosen == {"a": 0, "b": 0, "c": 0, "d": 0, "e": 0, "f": 3}


def test_grid_over_a_continuous_parameter_is_refused() -> None:
    with pytest.raises(SweepError, match="has no end of values"):
        GridSampler(Space({"a": pl.uniform(0, 1)}))
