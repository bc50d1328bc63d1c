"""Curves: reading, thinning and joining them."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest

from paceline.runs import series
from paceline.runs.metrics import MetricLog
from paceline.ui import curves as curves_module
from paceline.ui.curves import CurveStore, Key, RunCurves, thinned
from paceline.ui.views import run
from tests.ui.conftest import HOSTILE, Place, log_values


def test_curves_of_a_run_contain_the_numbers_that_it_logged(place: Place) -> None:
    folder = place.run()
    names = ["loss", "ü/acc", HOSTILE, 'a\\b"c']
    values = [0.1, -3, 1e-300, 7, 123456789012, 2.5e17]
    for rank in range(2):
        log = MetricLog(folder.metric_log(rank))
        for step, value in enumerate(values):
            for name in names:
                log.scalar(name, value, step)
        log.scalar("flag", True)
        log.other("list", "lr", [1, 2.5, 3])
        log.close()
    curves = RunCurves(folder, has_times=True)
    assert curves.look()
    assert not curves.look()
    for rank in range(2):
        for name, found in series.read(folder.metrics, rank=rank).items():
            curve = curves.curves[Key(name, rank, 1)]
            assert list(curve.ys) == [float(value) for value in found.values]
            assert list(curve.times) == list(found.times)
            assert curve.has_steps == (found.steps[0] is not None)
    assert curves.cuts(Key("loss", 0, 1)) == []


@pytest.mark.parametrize("names", [1, 3, 12])
@pytest.mark.parametrize("has_times", [False, True])
def test_fast_line_parser_equals_the_json_parser(
    place: Place, names: int, has_times: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read the log in small chunks: some chunks have only plain values, and others do not.
    monkeypatch.setattr(curves_module, "_CHUNK", 1 << 12)
    folder, drawn = place.run(), random.Random(names)
    log = MetricLog(folder.metric_log(0))
    for step in range(3000):
        name = f"metric {drawn.randrange(names)}"
        value = drawn.choice([drawn.random(), -drawn.random() * 1e-200, step, math.nan, -math.inf, 1e300])
        log.scalar(name, value, step if names == 1 else drawn.choice([None, step]), drawn.choice([None, 5.25]))
        if step % 400 == 200:
            log.scalar(name, drawn.choice(["warm", True, None]), step)
            log.other("list", name, [1, 2.5])
    log.close()
    with open(folder.metric_log(0), "a") as file:
        file.write('{"name":"metric 0","value":1-2,"time":1.0}\n{"name":"metric 0","value":7,"time":1.0,"step":9}\n')
    curves = RunCurves(folder, has_times=has_times)
    curves.look()
    found = series.read(folder.metrics)
    assert set(found) == {key.name for key in curves.curves}
    for key, curve in curves.curves.items():
        plain = [
            (v, t) for v, t in zip(found[key.name].values, found[key.name].times, strict=True) if type(v) is not str
        ]
        assert repr([*curve.ys]) == repr([float(value) for value, _ in plain if value is not None])
        assert [*curve.times] == [time for value, time in plain if value is not None and has_times]
        if names == 1 and not curve.has_steps:
            assert curve.xs("step", 0.0) == range(len(curve.ys))


def test_numbers_beyond_every_limit_do_not_stop_a_curve(place: Place) -> None:
    folder, digits, deep = place.run(), "9" * 400, "[" * 100_000 + "]" * 100_000
    folder.metric_log(0).write_text(
        f'{{"name":"loss","value":1,"step":0}}\n{{"name":"loss","value":2,"deep":{deep}}}\n'
        f'{{"name":"loss","value":{digits},"step":1}}\n{{"name":"loss","value":3,"time":{digits},"step":2}}\n'
        f'{{"name":"late","value":4,"step":{digits}}}\n'
    )
    curves = RunCurves(folder, has_times=True)
    curves.look()
    loss, late = curves.curves[Key("loss", 0, 1)], curves.curves[Key("late", 0, 1)]
    assert ([*loss.ys], [*loss.steps], loss.times[2]) == ([1.0, math.inf, 3.0], [0.0, 1.0, 2.0], math.inf)
    assert ([*late.ys], late.has_steps) == ([4.0], False)


def test_curves_read_only_new_complete_lines(place: Place) -> None:
    folder = place.run()
    log_values(folder, "loss", [1.0, 2.0])
    curves = RunCurves(folder)
    curves.look()
    line = json.dumps({"name": "loss", "value": 3.0, "time": 1.0, "step": 2}, separators=(",", ":")) + "\n"
    with open(folder.metric_log(0), "a") as file:
        file.write(line[:20])
        file.flush()
        curves.look()
        assert list(curves.curves[Key("loss", 0, 1)].ys) == [1.0, 2.0]
        file.write(line[20:] + "{broken\n" + line.replace("3.0", "4.0"))
    assert curves.look()
    assert list(curves.curves[Key("loss", 0, 1)].ys) == [1.0, 2.0, 3.0, 4.0]


def test_page_gets_the_curves_of_large_logs_in_pieces_but_a_file_gets_all_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves_module, "_CHUNK", 1 << 12)
    monkeypatch.setattr(run, "READ_S", 0.0)
    folder, client = place.run(), place.client()
    for rank in range(2):
        log_values(folder, "loss", range(200), rank=rank)
    counts, has_more = [], True
    while has_more:
        answer = client.get(f"/runs/{folder.run_id}/curves?name=loss&px=1000").json()
        has_more = answer["has_more"]
        counts.append([curve["n"] for curve in answer["curves"]])
    assert (len(counts[0]), counts[-1]) == (1, [200, 200])
    assert all(later >= earlier for earlier, later in itertools.pairwise(counts))
    whole = place.client().get(f"/runs/{folder.run_id}/curves?name=loss&whole=1").json()
    assert ([len(curve["y"]) for curve in whole["curves"]], whole["has_more"]) == ([200, 200], False)


@pytest.mark.promise("step-logged-twice-drawn-once")
def test_curve_of_a_second_attempt_starts_at_its_resume_step(place: Place) -> None:
    folder = place.run()
    log_values(folder, "loss", [0.0, 1.0, 2.0, 3.0, 4.0])
    log_values(folder, "loss", [30.0, 40.0, 50.0], attempt=2, first=3)
    curves = RunCurves(folder)
    curves.look()
    together: list[tuple[float | None, float | None]] = []
    for attempt in (1, 2):
        key = Key("loss", 0, attempt)
        together += zip(*thinned(curves.curves[key], 100, cuts=curves.cuts(key)), strict=True)
    read = series.read(folder.metrics)["loss"]
    assert together == [*zip(read.steps, read.values, strict=True)]
    # Without `cuts`, the curve of attempt 1 also has the two steps that attempt 2 has repeated.
    assert len(thinned(curves.curves[Key("loss", 0, 1)], 100)[0]) == 5


@pytest.mark.promise("spike-lost-curves-thinned-zoom")
def test_thinned_curve_keeps_extreme_values_and_a_zoomed_curve_is_exact(place: Place) -> None:
    folder = place.run()
    drawn = random.Random(7)
    values = [drawn.random() for _ in range(20_000)]
    values[7_777], values[12_345], values[3] = 99.0, -99.0, math.nan
    log_values(folder, "loss", values)
    curves = RunCurves(folder)
    curves.look()
    curve = curves.curves[Key("loss", 0, 1)]
    xs, ys = thinned(curve, 500)
    assert len(xs) == len(ys) <= 1000
    assert (7_777, 99.0) in zip(xs, ys, strict=True)
    assert (12_345, -99.0) in zip(xs, ys, strict=True)
    assert xs == sorted(xs)
    # The curve has one point beyond each end of the window, so that the line reaches the edge.
    xs, ys = thinned(curve, 500, window=(100.5, 300))
    assert (xs, ys) == ([*range(100, 302)], values[100:302])
    assert thinned(curve, 500, window=(0, 5))[1][3] is None


def test_curve_window_selects_steps_that_were_logged_out_of_order(place: Place) -> None:
    folder = place.run()
    log = MetricLog(folder.metric_log(0))
    for step in (5, 1, 9, 2):
        log.scalar("loss", float(step), step)
    log.close()
    curves = RunCurves(folder)
    curves.look()
    assert sorted(thinned(curves.curves[Key("loss", 0, 1)], 10, window=(1, 5))[0]) == [1, 2, 5]


def test_rows_texts_and_images_are_not_shown_as_curves(place: Place) -> None:
    folder = place.run()
    log = MetricLog(folder.metric_log(0))
    log.other("row", "epochs", {"epoch": 1, "loss": 0.5})
    log.scalar("state", "warm")
    log.scalar("nothing", None)
    for _ in range(500):
        log.other("image", "plot", "images/plot.png")
    log.close()
    curves = RunCurves(folder)
    curves.look()
    assert curves.curves == {}
    assert {name: len(logged) for name, logged in curves.others.items()} == {
        **{"epochs": 1, "state": 1, "nothing": 1},
        "plot": 500,
    }
    assert curves.other_count == 503
    assert [curves.others[name][0].read() for name in ("epochs", "state")] == [{"epoch": 1, "loss": 0.5}, "warm"]


def test_curve_store_evicts_least_recently_used_runs(place: Place) -> None:
    folders = [place.run(f"digits_170000000{n}_00000001") for n in range(3)]
    for folder in folders:
        log_values(folder, "loss", [1.0] * 10)
    kept = CurveStore(most_numbers=25)
    for folder in folders:
        with kept.open(folder) as curves:
            curves.look()
    with kept.open(folders[2]) as curves:
        assert curves.size == 10
    with kept.open(folders[0]) as curves:
        assert curves.size == 0
    assert Path(folders[0].path).exists()


def test_curve_store_counts_open_readers_also_after_an_error(place: Place) -> None:
    folder, store = place.run("digits_1700000000_00000001"), CurveStore()
    assert not store.is_open()
    with store.open(folder), store.open(folder, has_times=True):
        assert store.is_open()
    with pytest.raises(ValueError, match="broken"), store.open(folder):
        raise ValueError("broken")
    assert not store.is_open()
