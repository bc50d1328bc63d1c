"""One last, best, min, max and count for each metric of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.runs.metrics import MetricLog
from paceline.runs.search import summaries
from paceline.runs.search.summaries import MetricFacts, SummaryReader, goal_of


def log_values(
    folder: Path, name: str, values: list[object], *, rank: int = 0, attempt: int = 1, first: int = 0
) -> None:
    log = MetricLog(
        folder / (f"rank_{rank}.jsonl" if attempt == 1 else f"rank_{rank}.{attempt}.jsonl"), attempt=attempt
    )
    for step, value in enumerate(values):
        if isinstance(value, list):
            log.other("list", name, value, first + step)
        else:
            log.scalar(name, value, first + step)
    log.close()


def test_metric_summary_uses_the_lowest_rank_that_logged_the_metric(tmp_path: Path) -> None:
    log_values(tmp_path, "loss", [3.0, 1.0, 2.0])
    log_values(tmp_path, "loss", [0.5], rank=1)
    log_values(tmp_path, "only on 2", [7], rank=2)
    log_values(tmp_path, "only on 2", [8], rank=10)
    assert dict(SummaryReader(tmp_path).look()) == {
        "loss": MetricFacts(2.0, 1.0, 3.0, 3, "minimize"),
        "only on 2": MetricFacts(7.0, 7.0, 7.0, 1),
    }


def test_later_attempt_replaces_summarized_metric_values_from_its_first_step_onwards(tmp_path: Path) -> None:
    log_values(tmp_path, "acc", [0.1, 0.2, 0.9, 0.8])
    reader = SummaryReader(tmp_path)
    assert reader.look()["acc"].best == 0.9
    log_values(tmp_path, "acc", [0.3, 0.25], attempt=2, first=2)
    reader = SummaryReader(tmp_path)
    for _ in range(2):
        assert reader.look()["acc"] == MetricFacts(0.25, 0.1, 0.3, 4, "maximize")


def test_metric_summary_of_two_attempts_in_one_file_replaces_the_steps_logged_again(tmp_path: Path) -> None:
    log_values(tmp_path, "acc", [0.1, 0.9])
    with open(tmp_path / "rank_0.jsonl", "a") as file:
        file.write('{"attempt":2,"time":9}\n{"name":"acc","value":0.5,"time":9,"step":1}\n')
    assert SummaryReader(tmp_path).look()["acc"] == MetricFacts(0.5, 0.1, 0.5, 2, "maximize")


@pytest.mark.parametrize("values", [[math.nan, 2.0, 1.0, math.nan], [2.0, math.nan, 1.0, math.nan]])
def test_last_value_of_a_metric_may_be_nan_but_min_and_max_ignore_nan(tmp_path: Path, values: list[object]) -> None:
    log_values(tmp_path, "x", values)
    log_values(tmp_path, "y", [math.nan])
    found = SummaryReader(tmp_path).look()
    assert math.isnan(found["x"].last)
    assert (found["x"].min, found["x"].max, found["x"].count) == (1.0, 2.0, 4)
    assert (found["y"].min, found["y"].max, found["y"].count) == (None, None, 1)


def test_metric_summaries_read_only_appended_lines_and_skip_broken_ones(tmp_path: Path) -> None:
    log_values(tmp_path, "x", [1.0, True, None, "text", [5, 6], 10**400])
    reader = SummaryReader(tmp_path)
    assert reader.look()["x"] == MetricFacts(math.inf, 1.0, math.inf, 4)
    with open(tmp_path / "rank_0.jsonl", "a") as file:
        file.write('{"name":["x"],"value":1}\n[]\nnull\n{"name":"x","kind":"row","value":9}\n{"na\n')
        file.write('{"name":"x","value":-1}\n{"name":"x","value":')
    assert reader.look()["x"] == MetricFacts(-1.0, -1.0, math.inf, 5)


def test_metrics_beyond_the_maximum_number_have_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "MOST_METRICS", 3)
    for rank in range(2):
        for number in range(3):
            log_values(tmp_path, f"{rank} {number}", [1.0], rank=rank)
    assert list(SummaryReader(tmp_path).look()) == ["0 0", "0 1", "0 2"]


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("val/acc", "maximize"),
        ("valAccuracy", "maximize"),
        ("top1", "maximize"),
        ("eval_loss", "minimize"),
        ("glossary", None),
    ],
)
def test_metric_goal_is_inferred_from_words_in_its_name(name: str, goal: str | None) -> None:
    assert goal_of(name) == goal


def test_run_with_12000_metrics_has_a_summary_of_each_metric(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "rank_0.jsonl", attempt=1)
    for number in range(12_000):
        log.scalar(f"layer{number // 100}/weight_{number}", float(number), 0)
    log.scalar("val/loss", 0.5, 0)
    log.close()
    found = SummaryReader(tmp_path).look()
    assert (len(found), found["layer119/weight_11999"].last) == (12_001, 11_999.0)
    assert summaries.headline(found, 1) == [("val/loss", 0.5)]
