from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

import paceline
from paceline.errors import UserError
from paceline.runs import series
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.run import Run
from paceline.workspace import Experiment, Workspace
from tests.helpers import make_job, make_run


def log(folder: RunFolder, rank: int = 0, attempt: int = 1) -> MetricLog:
    return MetricLog(folder.metric_log(rank, attempt), attempt=attempt)


def test_metric_series_has_steps_values_and_times(tmp_path, monkeypatch):
    # The clock advances by one second at each line, also at the first line of the file, which names the log's owner.
    times = iter(range(100, 200))
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


def test_min_and_max_of_a_series_ignore_non_numbers(tmp_path):
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


def test_series_joins_the_attempts_of_a_given_rank_or_merges_all_ranks_by_default(tmp_path):
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


def test_metric_logged_in_several_forms_keeps_the_last_form(tmp_path):
    folder = RunFolder(tmp_path)
    writer = log(folder)
    writer.scalar("m", 1, 0)
    writer.other("row", "m", {"x": 2})
    writer.close()
    assert series.read(folder.metrics)["m"].values == ({"x": 2},)


def test_run_metrics_returns_series_by_name(tmp_path):
    folder, fd = make_run(tmp_path / "runs")
    writer = log(folder)
    writer.scalar("loss", 0.5, 1)
    writer.close()
    run = Run(Experiment(Workspace(tmp_path), "digits"), folder.run_id)

    assert run.metrics("loss").values == (0.5,)
    assert list(run.metrics()) == ["loss"]
    assert len(run.metrics("accuracy")) == 0
    os.close(fd)


def restarted(folder: RunFolder) -> None:
    """Two ranks; of rank 0 the second attempt takes up at step 1."""
    log(folder).scalar("loss", 3.0, 0)
    log(folder).scalar("loss", 2.0, 1)
    log(folder, rank=1).scalar("loss", 30.0, 0)
    log(folder, attempt=2).scalar("loss", 2.5, 1)
    log(folder).scalar("once", 7)


@pytest.mark.promise("series-says-logged-value-attempt")
def test_each_value_of_a_metric_series_has_its_rank_and_attempt(tmp_path):
    folder = RunFolder(tmp_path)
    restarted(folder)
    found = series.read(folder.metrics)

    loss = found["loss"]
    assert sorted(zip(loss.steps, loss.values, loss.ranks, loss.attempts, strict=True)) == [
        (0, 3.0, 0, 1),
        (0, 30.0, 1, 1),
        (1, 2.5, 0, 2),
    ]
    assert (found["once"].ranks, found["once"].attempts) == ((0,), (1,))
    assert series.read(folder.metrics, rank=[1])["loss"].values == (30.0,)
    assert sorted(series.read(folder.metrics, rank=(0, 1), name="loss")["loss"].values) == [2.5, 3.0, 30.0]
    assert series.read(folder.metrics, attempt=1, rank=0)["loss"].values == (3.0, 2.0), "nothing is left out"
    later = series.read(folder.metrics, attempt=2)["loss"]
    assert (later.values, later.attempts) == ((2.5,), (2,))
    assert series.read(folder.metrics, attempt=[1, 2], rank=0)["loss"].values == (3.0, 2.5)


def test_series_becomes_a_pandas_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    folder = RunFolder(tmp_path)
    restarted(folder)
    found = series.read(folder.metrics, rank=0)

    frame = found["loss"].to_pandas()
    assert frame[["step", "value", "rank", "attempt"]].to_dict("list") == {
        "step": [0, 1],
        "value": [3.0, 2.5],
        "rank": [0, 0],
        "attempt": [1, 2],
    }
    assert [time.timestamp() for time in frame["time"]] == list(found["loss"].times), "to the microsecond, as written"
    assert str(frame["time"].dt.tz) == "UTC"
    assert frame["value"].dtype == "float64"
    once = found["once"].to_pandas()
    assert (once["value"].tolist(), once["step"].isna().tolist(), str(once["step"].dtype)) == ([7], [True], "Int64")
    empty = series.MetricSeries(name="none").to_pandas()
    assert (list(empty.columns), len(empty)) == (["step", "value", "time", "rank", "attempt"], 0)
    assert len(pandas.concat([frame, once, empty])) == 3


def test_to_pandas_without_pandas_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install 'paceline\[tabular\]'"):
        series.MetricSeries(name="loss").to_pandas()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank": 1}, "rank=1: run .* has rank 0 alone"),
        ({"rank": [0, -1]}, r"rank=\[0, -1\]"),
        ({"rank": "0"}, "rank='0'"),
        ({"rank": True}, "rank=True"),
        ({"attempt": 0}, "attempt=0: run .* has attempt 1 alone"),
        ({"attempt": 2}, "attempt=2"),
    ],
)
def test_run_metrics_refuses_a_rank_or_attempt_that_does_not_exist(tmp_path, given, said):
    folder, fd = make_run(tmp_path / "ws/runs")
    os.close(fd)
    run = Run(Experiment(Workspace(tmp_path / "ws"), "digits"), folder.run_id)
    with pytest.raises(UserError, match=said):
        run.metrics("loss", **given)


pytest.importorskip("matplotlib", reason="needs matplotlib")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    job = make_job(process_count_per_node=2, distributed_backend="gloo")
    folder, fd = make_run(tmp_path / "ws" / "runs", job=job)
    os.close(fd)
    for rank in range(2):
        log = MetricLog(folder.metric_log(rank))
        for step in range(3):
            log.scalar("loss", 1.0 / (step + 1) + rank, 10 * step)
        log.scalar("stage", "warm")
    log.scalar("$a_b$", 2.0)
    return paceline.Run.get(paceline.Workspace(tmp_path / "ws"), folder.run_id)


@pytest.mark.promise("run-shows-itself-notebook-live")
def test_plot_has_axes_for_each_metric_and_a_curve_for_each_rank(run: Run, tmp_path: Path) -> None:
    figure = run.plot()
    loss, other = figure.axes
    assert [axes.get_title() for axes in (loss, other)] == ["loss", r"\$a_b\$"]
    assert [line.get_label() for line in loss.lines] == ["rank 0", "rank 1"]
    assert list(loss.lines[1].get_xdata()) == [0, 10, 20]
    assert list(loss.lines[1].get_ydata()) == [2.0, 1.5, 1.0 / 3 + 1]
    assert [line.get_marker() for line in other.lines] == ["o"]
    figure.savefig(tmp_path / "metrics.png")
    assert (tmp_path / "metrics.png").stat().st_size > 1000
    assert [len(axes.lines) for axes in run.plot("loss", rank=0).axes] == [1]


def test_plot_of_a_missing_metric_or_rank_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match=r"plot\('los'\): run .* has no such metric. There are loss, stage, "):
        run.plot("los")
    with pytest.raises(UserError, match="has no metric with numbers to draw"):
        run.plot("stage")
    with pytest.raises(UserError, match="rank"):
        run.plot(rank=7)
