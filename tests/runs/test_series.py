from __future__ import annotations

import math
import os

from paceline.runs import series
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.run import Run
from paceline.workspace import Experiment, Workspace
from tests.helpers import make_run


def log(folder: RunFolder, rank: int = 0, attempt: int = 1) -> MetricLog:
    return MetricLog(folder.metric_log(rank, attempt), attempt=attempt)


def test_a_metric_is_a_series_of_steps_values_and_times_however_often_it_was_logged(tmp_path, monkeypatch):
    times = iter(range(100, 200))  # a second each; the file's first line, which says whose it is, takes one as well
    monkeypatch.setattr("paceline.runs.metrics.time.time", lambda: float(next(times)))
    folder = RunFolder(tmp_path)
    writer = log(folder)
    writer.scalar("loss", 0.5, 3)
    writer.scalar("loss", 0.25, 4)
    writer.scalar("once", 7)
    writer.other("list", "list", [1, 2])
    writer.other("row", "row", {"x": 1})
    writer.other("image", "image", "images/a.png")
    writer.close()
    found = series.read(folder.metrics)

    assert list(found) == ["loss", "once", "list", "row", "image"]
    assert list(found["loss"]) == [(3, 0.5, 100.0), (4, 0.25, 102.0)]
    assert (found["once"].steps, found["once"].values, len(found["once"])) == ((None,), (7,), 1)
    assert (found["list"].values, found["list"].times) == ((1, 2), (104.0, 104.0))
    assert (found["row"].values, found["image"].values) == (({"x": 1},), ("images/a.png",))
    assert list(series.read(folder.metrics, name="once")) == ["once"]


def test_the_least_and_the_greatest_are_of_numbers(tmp_path):
    folder = RunFolder(tmp_path)
    writer = log(folder)
    for value in (2, math.nan, 0.5, math.inf):
        writer.scalar("n", value)
    writer.scalar("text", "a")
    writer.scalar("flag", True)
    writer.scalar("nan", math.nan)
    writer.close()
    found = series.read(folder.metrics)

    assert (found["n"].last, found["n"].min, found["n"].max) == (math.inf, 0.5, math.inf)
    assert [(found[name].min, found[name].max) for name in ("text", "flag", "nan")] == [(None, None)] * 3
    empty = series.MetricSeries(name="none")
    assert (empty.last, empty.last_step, empty.min, empty.max, len(empty), list(empty)) == (
        None,
        None,
        None,
        None,
        0,
        [],
    )


def test_attempts_are_one_series_and_ranks_are_merged_or_apart(tmp_path):
    folder = RunFolder(tmp_path)
    for attempt, steps in ((1, range(4)), (2, range(2, 6))):
        writer = log(folder, 0, attempt)
        for step in steps:
            writer.scalar("loss", attempt, step)
        writer.close()
    writer = log(folder, 1)
    writer.scalar("loss", 9, 0)
    writer.close()

    of_one = series.read(folder.metrics, rank=0)["loss"]
    assert (of_one.steps, of_one.values) == ((0, 1, 2, 3, 4, 5), (1, 1, 2, 2, 2, 2))
    assert sorted(series.read(folder.metrics)["loss"].values) == [1, 1, 2, 2, 2, 2, 9]


def test_a_name_logged_in_different_ways_counts_as_the_last_way(tmp_path):
    folder = RunFolder(tmp_path)
    writer = log(folder)
    writer.scalar("m", 1, 0)
    writer.other("row", "m", {"x": 2})
    writer.close()
    assert series.read(folder.metrics)["m"].values == ({"x": 2},)


def test_a_run_gives_its_series(tmp_path):
    folder, fd = make_run(tmp_path / "runs")
    writer = log(folder)
    writer.scalar("loss", 0.5, 1)
    writer.close()
    run = Run(Experiment(Workspace(tmp_path), "digits"), folder.run_id)

    assert run.metrics("loss").values == (0.5,)
    assert list(run.metrics()) == ["loss"]
    assert len(run.metrics("accuracy")) == 0
    assert len(run.metrics("loss", rank=1)) == 0
    os.close(fd)
