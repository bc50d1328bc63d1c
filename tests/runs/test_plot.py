"""The metrics of a run as curves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import paceline
from paceline.errors import UserError
from paceline.runs.metrics import MetricLog
from paceline.runs.run import Run
from tests.helpers import make_job, make_run

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


def test_each_metric_has_axes_and_each_rank_a_curve(run: Run, tmp_path: Path) -> None:
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


def test_what_can_t_be_drawn_is_said(run: Run) -> None:
    with pytest.raises(UserError, match=r"plot\('los'\): run .* has no such metric. There are loss, stage, "):
        run.plot("los")
    with pytest.raises(UserError, match="has no metric with numbers to draw"):
        run.plot("stage")
    with pytest.raises(UserError, match="rank"):
        run.plot(rank=7)
