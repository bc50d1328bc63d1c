from __future__ import annotations

import pytest

from paceline.compat.horovod.common.autotune_search import Point, Search

START = Point(fusion_bytes=1 << 22, cycle_s=0.001)


def tried(search, score):
    """The points in the order in which they are tried, where `score` says how good each is."""
    found, point = [], search.start
    while point is not None:
        found.append(point)
        assert len(found) < 100
        point = search.take(point, score(point))
    return found


def test_the_best_of_each_setting_is_found():
    search = Search(START)
    tried(search, lambda point: 100.0 + 50 * (point.fusion_bytes == 1 << 18) + 20 * (point.cycle_s == 0.005))
    assert search.best == Point(fusion_bytes=1 << 18, cycle_s=0.005)


@pytest.mark.parametrize("sign", [1, -1])
def test_no_point_is_tried_twice(sign):
    points = tried(Search(START), lambda point: 1e9 + sign * (point.fusion_bytes * 100 + point.cycle_s * 1e9))
    assert len(points) == len(set(points)) == 8


def test_what_is_hardly_better_is_noise():
    search = Search(START)
    tried(search, lambda point: 100.0 if point == START else 101.5)
    assert search.best == START


@pytest.mark.parametrize(("frozen", "kept"), [({"fusion": False}, "fusion_bytes"), ({"cycle": False}, "cycle_s")])
def test_what_was_set_by_hand_stays(frozen, kept):
    points = tried(Search(START, **frozen), lambda point: 1.0)
    assert len(points) > 1
    assert {getattr(point, kept) for point in points} == {getattr(START, kept)}


def test_with_both_set_by_hand_there_is_nothing_to_try():
    assert tried(Search(START, fusion=False, cycle=False), lambda point: 1.0) == [START]


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_there_are_no_more_samples_than_allowed(samples):
    assert len(tried(Search(START, samples=samples), lambda point: 1.0)) == samples
