"""The data of charts that a user composes."""

from __future__ import annotations

import math

import pytest

from paceline.errors import UserError
from paceline.runs.folder import RunFolder
from paceline.ui import own_charts
from paceline.ui.curves import RunCurves
from paceline.ui.own_charts import OwnChart, OwnQuery, own_chart
from tests.ui.conftest import HOSTILE, Place, log_values


def folder_of(place: Place) -> RunFolder:
    return RunFolder(next(place.runs_dir.iterdir()))


def chart(place: Place, **query: str) -> OwnChart:
    curves = RunCurves(folder_of(place))
    curves.look()
    return own_chart(curves, OwnQuery(**query))


@pytest.fixture
def logged(place: Place) -> Place:
    folder = place.run()
    log_values(folder, "loss", [3.0, 2.0, 1.0])
    log_values(folder, "lr", [0.1, 0.2], first=1)
    log_values(folder, "final/a", [5.0])
    log_values(folder, "final/b", [1.0, 7.0])
    log_values(folder, "loss", [4.0, 8.0], rank=1)
    return place


def test_scatter_chart_of_two_metrics_joins_values_by_step_and_rank(logged: Place) -> None:
    found = chart(logged, kind="scatter", y="loss", x="lr")
    assert found["curves"] == [{"text": "rank 0", "x": [0.1, 0.2], "y": [2, 1]}]


def test_points_beyond_the_limit_are_left_out_with_a_note(logged: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_charts, "_POINTS", 1)
    found = chart(logged, kind="line", y="loss", x="loss")
    assert len(found["curves"][0]["x"]) == 1
    assert "points are left out" in found["note"]


def test_bar_chart_shows_last_values_of_several_metrics_or_ranks(logged: Place) -> None:
    metrics = chart(logged, kind="bar", y="final/")
    assert (metrics["labels"], metrics["curves"][0]["y"]) == (["final/a", "final/b"], [5, 7])
    ranks = chart(logged, kind="bar", y="loss")
    assert (ranks["labels"], ranks["curves"][0]["y"]) == (["rank 0", "rank 1"], [1, 8])
    assert chart(logged, kind="bar", y="nothing")["curves"] == []


def test_histogram_counts_every_finite_value(logged: Place) -> None:
    log_values(folder_of(logged), "odd", [1.0, 1.0, math.nan, math.inf])
    found = chart(logged, kind="histogram", y="loss")
    assert sum(y for y in found["curves"][0]["y"] if y is not None) == 5
    same = chart(logged, kind="histogram", y="odd")
    assert (same["curves"][0]["x"], same["curves"][0]["y"]) == ([1], [2])
    assert same["note"] == "2 values are not finite"
    assert chart(logged, kind="histogram", y="nothing")["note"] == "no finite values"


@pytest.mark.parametrize("values", [[1e308, -1e308], [1e308, 0.0, -1.7e308], [5e-324, 0.0]])
def test_histogram_of_the_largest_and_smallest_floats_has_finite_bars(logged: Place, values: list[float]) -> None:
    log_values(folder_of(logged), "wide", values)
    found = chart(logged, kind="histogram", y="wide")
    assert sum(y for y in found["curves"][0]["y"] if y is not None) == len(values)
    assert None not in found["curves"][0]["x"]
    assert 0 < found["width"] < math.inf


def test_unknown_chart_kind_is_refused_with_the_valid_kinds(logged: Place) -> None:
    with pytest.raises(UserError, match="kind must be one of line, scatter, bar, histogram, got 'pie'"):
        OwnQuery(kind="pie", y="loss")
    client = logged.client()
    run_id = folder_of(logged).run_id
    assert client.get(f"/runs/{run_id}/own?kind=pie&y=loss").status_code == 409
    answer = client.get(f"/runs/{run_id}/own", params={"kind": "bar", "y": HOSTILE})
    assert answer.json()["curves"] == []
