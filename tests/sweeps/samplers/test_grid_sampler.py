"""Each point of a space, in order."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.errors import SweepError
from paceline.sweeps.samplers.grid_sampler import GridSampler
from paceline.sweeps.space import Space


def test_trials_get_the_points_in_order_whoever_asks() -> None:
    space = Space({"a": pl.choice(1, 2), "b": pl.choice("x", "y")})
    sampler = GridSampler(space)
    found = [sampler.propose(number, ()) for number in range(5)]
    assert [space.values(proposal.chosen) for proposal in found[:4] if proposal] == [
        *({"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}),
    ]
    assert found[4] is None
    assert GridSampler(space).propose(2, ()) == found[2]


def test_what_the_user_has_tried_first_is_not_tried_again_and_nothing_is_left_out() -> None:
    space = Space({"a": pl.choice(1, 2, 3)})
    sampler = GridSampler(space, [space.chosen({"a": 2})])
    found = [sampler.propose(number, ()) for number in range(1, 4)]
    assert [space.values(proposal.chosen)["a"] for proposal in found[:2] if proposal] == [1, 3]
    assert found[2] is None


def test_a_large_grid_is_not_made_before_it_is_asked_for() -> None:
    space = Space({name: pl.randint(1000) for name in "abcdef"})
    proposal = GridSampler(space).propose(3, ())
    assert proposal is not None
    assert proposal.chosen == {"a": 0, "b": 0, "c": 0, "d": 0, "e": 0, "f": 3}


def test_a_continuum_has_no_grid() -> None:
    with pytest.raises(SweepError, match="has no end of values"):
        GridSampler(Space({"a": pl.uniform(0, 1)}))
