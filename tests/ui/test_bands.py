"""Many ranks as one band: mean, least and greatest value."""

from __future__ import annotations

import math
import random
from array import array

from paceline.ui.bands import band_of, thinned_band
from paceline.ui.curves import Curve


def curve(values: dict[float, float]) -> Curve:
    made = Curve()
    made.add(array("d", values.values()), array("d", values), array("d", [1000.0 + step for step in values]))
    return made


def test_band_has_mean_and_bounds_of_each_step() -> None:
    band = band_of([curve({0: 1, 1: 5}), curve({0: 3, 1: 1}), curve({0: 2, 1: 0})])
    assert (band.xs, band.mean, band.least, band.greatest, band.count) == ([0, 1], [2, 2], [1, 0], [3, 5], 6)


def test_ranks_behind_and_ranks_with_other_steps_count_where_they_logged() -> None:
    behind = band_of([curve({0: 1, 1: 5, 2: 7}), curve({0: 3, 1: 1}), curve({0: 2, 1: 0})])
    assert (behind.xs[2], behind.mean[2], behind.least[2]) == (2, 7, 7)
    other = band_of([curve({0: 1, 2: 5}), curve({1: 3, 2: 1})])
    assert (other.xs, other.mean, other.greatest) == ([0, 1, 2], [1, 3, 3], [1, 3, 5])


def test_values_that_are_not_finite_are_gaps_only_where_all_ranks_have_them() -> None:
    band = band_of([curve({0: math.nan, 1: math.inf}), curve({0: 3, 1: math.nan})])
    assert band.mean[0] == 3
    assert thinned_band(band, 10)[1] == [3, None]


def test_band_follows_the_clock_and_leaves_out_steps_that_were_logged_again() -> None:
    curves = [curve({0: 1, 1: 5}), curve({0: 3, 1: 1})]
    assert band_of(curves, axis="time").xs == [1000, 1001]
    assert band_of(curves, axis="relative", origin_s=1000).xs == [0, 1]
    assert band_of(curves, cuts=[(1, math.inf)]).xs == [0]


def test_thinned_band_keeps_every_spike() -> None:
    drawn = random.Random(1)
    values = [[drawn.random() for _ in range(5000)] for _ in range(3)]
    values[1][2777] = 99.0
    band = band_of([curve(dict(enumerate(one))) for one in values])
    xs, mean, least, greatest = thinned_band(band, 100)
    assert len(xs) == len(mean) == 100
    assert max(value for value in greatest if value is not None) == 99
    assert min(value for value in least if value is not None) == min(map(min, values))
    assert len(thinned_band(band, 100, (10, 12))[0]) == 3
