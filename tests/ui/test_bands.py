"""Many ranks as one band: mean, least and greatest value."""

from __future__ import annotations

import math
import random
from array import array

from paceline.runs.metrics import MetricLog
from paceline.system.files import write_json
from paceline.ui.bands import band_of, thinned_band
from paceline.ui.curves import Curve
from tests.helpers import make_job
from tests.ui.conftest import Place


def curve(values: dict[float, float]) -> Curve:
    made = Curve()
    made.add(array("d", values.values()), array("d", values), array("d", [1000.0 + step for step in values]))
    return made


def test_band_of_several_ranks_has_the_mean_minimum_and_maximum_of_each_step() -> None:
    band = band_of([curve({0: 1, 1: 5}), curve({0: 3, 1: 1}), curve({0: 2, 1: 0})])
    assert (band.xs, band.mean, band.least, band.greatest, band.count) == ([0, 1], [2, 2], [1, 0], [3, 5], 6)


def test_band_includes_each_rank_at_the_steps_that_it_logged() -> None:
    behind = band_of([curve({0: 1, 1: 5, 2: 7}), curve({0: 3, 1: 1}), curve({0: 2, 1: 0})])
    assert (behind.xs[2], behind.mean[2], behind.least[2]) == (2, 7, 7)
    other = band_of([curve({0: 1, 2: 5}), curve({1: 3, 2: 1})])
    assert (other.xs, other.mean, other.greatest) == ([0, 1, 2], [1, 3, 3], [1, 3, 5])


def test_band_has_a_gap_only_where_all_ranks_are_not_finite() -> None:
    band = band_of([curve({0: math.nan, 1: math.inf}), curve({0: 3, 1: math.nan})])
    assert band.mean[0] == 3
    assert thinned_band(band, 10)[1] == [3, None]


def test_band_of_several_ranks_can_use_the_time_axis_and_omits_steps_that_are_logged_again() -> None:
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


def test_resource_curves_of_a_run_can_be_limited_to_a_node_and_its_ranks(place: Place) -> None:
    folder = place.run(job=make_job(node_count=2, process_count_per_node=2, distributed_backend="gloo"))
    ranks = {str(rank): {"node": f"n{rank // 2}"} for rank in range(4)}
    write_json(folder.load(1), {"nodes": {"0": {"name": "n0"}, "1": {"name": "n1"}}, "ranks": ranks})
    for path, name in [(folder.node_log(node), "cpu_percent") for node in range(2)] + [
        (folder.load_log(rank), "rank_cpu_percent") for rank in range(4)
    ]:
        log = MetricLog(path)
        log.scalar(name, 5.0, 1_700_000_000)
        log.close()
    client = place.client()
    assert '<option value="1">n1</option>' in client.get(f"/runs/{folder.run_id}").text

    def shown(query: str) -> list[tuple[str, int]]:
        asked = f"/runs/{folder.run_id}/curves?name=cpu_percent&name=rank_cpu_percent&list=asked{query}"
        return [(curve["name"], curve["rank"]) for curve in client.get(asked).json()["curves"]]

    assert shown("&node=1") == [("cpu_percent", 1), ("rank_cpu_percent", 2), ("rank_cpu_percent", 3)]
    assert len(shown("")) == 6
    # The damaged sample has no nodes.
    write_json(folder.load(1), {"nodes": {"x": 3}, "ranks": []})
    assert "system-node" not in client.get(f"/runs/{folder.run_id}").text
