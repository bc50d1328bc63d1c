"""Random points: seeded, without repeats where a space has an end."""

from __future__ import annotations

import paceline as pl
from paceline.sweeps.samplers.random_sampler import RandomSampler
from paceline.sweeps.space import Space
from paceline.sweeps.trial import Trial

SPACE = Space({"lr": pl.loguniform(1e-4, 1e-1), "n": pl.randint(10)})


def test_a_proposal_depends_on_the_seed_and_the_number_alone() -> None:
    one = RandomSampler(SPACE, 3)
    points = [one.propose(number, ()) for number in range(20)]
    assert [RandomSampler(SPACE, 3).propose(number, ()) for number in reversed(range(20))] == points[::-1]
    assert RandomSampler(SPACE, 4).propose(0, ()) != points[0]
    assert len({str(point) for point in points}) == 20


def test_a_small_space_gives_each_point_once_and_then_nothing() -> None:
    space = Space({"a": pl.choice(1, 2, 3), "b": pl.choice({"c": pl.choice(4, 5)}, {})})
    sampler = RandomSampler(space, 0)
    trials: list[Trial] = []
    while (proposal := sampler.propose(len(trials), trials)) is not None:
        trials.append(Trial(number=len(trials), run_id="", chosen=proposal.chosen))
    assert len({str(trial.chosen) for trial in trials}) == len(trials) == space.size == 9


def test_repeats_are_had_by_asking() -> None:
    space = Space({"a": pl.choice(1, 2)})
    sampler = RandomSampler(space, 0, repeats=True)
    points = [sampler.propose(number, ()) for number in range(20)]
    assert {str(point.chosen) for point in points if point} == {"{'a': 0}", "{'a': 1}"}


def test_quantised_values_do_not_come_twice_either() -> None:
    space = Space({"a": pl.quniform(0, 1, 0.5)})
    sampler = RandomSampler(space, 0)
    trials: list[Trial] = []
    while (proposal := sampler.propose(len(trials), trials)) is not None:
        trials.append(Trial(number=len(trials), run_id="", chosen=proposal.chosen))
    assert sorted(space.values(trial.chosen)["a"] for trial in trials) == [0, 0.5, 1]
