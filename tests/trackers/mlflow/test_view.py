"""What MLflow reads of a run, as MLflow's own store gives it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        # Each logged value is (value, step, time). Regression: the last logged value was returned, even if an earlier value
        # had a greater step.
        ([(5.0, 5, 10.0), (1.0, 1, 20.0)], (5.0, 5)),
        ([(5.0, 3, 20.0), (1.0, 3, 10.0)], (5.0, 3)),
        ([(5.0, 3, 10.0), (1.0, 3, 10.0)], (5.0, 3)),
        ([(5.0, None, 10.0), (1.0, None, 20.0)], (1.0, 1)),
        ([(float("nan"), 3, 10.0), (1.0, 3, 10.0)], (1.0, 3)),
        ([(1.0, 3, float("nan")), (2.0, 3, 1e307), (3.0, 3, 10.0)], (3.0, 3)),
        ([(10**400, 3, 10.0)], (math.inf, 3)),
    ],
    ids=["step", "time", "value", "no steps", "nan", "impossible time", "huge integer"],
)
def test_latest_metric_value_is_by_greatest_step_then_time_then_value(
    tmp_path: Path, logged: list[tuple[float, int | None, float]], expected: tuple[float, int]
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from paceline.trackers.mlflow import view

    folder = RunFolder(tmp_path / "e_1700000000_00000000")
    folder.metrics.mkdir(parents=True)
    log = MetricLog(folder.metrics / "rank_0.jsonl")
    for value, step, time_s in logged:
        log.scalar("loss", value, step, time_s)
    log.close()
    path = folder.metrics / "rank_0.jsonl"
    path.write_text(path.read_text().replace(',"time":nan', ""))
    (metric,) = view.last_metrics(folder)
    assert (metric.value, metric.step) == expected
