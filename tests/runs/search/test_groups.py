"""Groups of runs and their means."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.runs.search.facts import RunFacts, read_facts
from paceline.runs.search.fields import field_of
from paceline.runs.search.groups import MeanSpread, grouped, spread
from paceline.runs.search.resources import read_resources
from paceline.runs.search.summaries import MetricSummaries, main_metric
from tests.helpers import make_run


def _runs(*numbers: tuple[str, float]) -> list[RunFacts]:
    return [
        RunFacts(run_id=f"a_{place}", experiment=name, metrics=MetricSummaries.of({"acc": (acc, acc, acc, 1)}))
        for place, (name, acc) in enumerate(numbers)
    ]


def test_spread_of_values_is_their_mean_sample_deviation_and_count() -> None:
    found = spread([1.0, 2.0, None, math.nan, 4.0])
    assert found is not None
    assert (found.count, round(found.mean, 6), round(found.deviation or 0, 6)) == (3, 2.333333, 1.527525)
    assert str(spread([0.5])) == "0.5 (1)"
    assert spread([None, math.nan]) is None
    # Values that include a string, such as lr=auto, have no mean.
    assert spread([0.1, "auto"]) is None
    assert spread([1e308, 1e308]) == MeanSpread(1e308, 0.0, 2)
    assert spread([math.inf, 1.0]) == MeanSpread(math.inf, None, 2)
    assert spread([10**400]) == MeanSpread(math.inf, None, 1)


def test_run_groups_are_in_order_of_their_first_run_or_sorted_by_mean_metric_if_requested() -> None:
    runs = _runs(("b", 0.5), ("a", 0.9), ("", 1.0), ("b", 0.7))
    by = field_of("experiment")
    assert [(group.text, len(group.runs)) for group in grouped(runs, by)] == [("b", 2), ("a", 1), ("-", 1)]
    assert [group.text for group in grouped(runs, by, "metrics.acc")] == ["b", "a", "-"]
    assert [group.text for group in grouped(runs, by, "metrics.acc.best")] == ["-", "a", "b"]
    assert grouped([], by, "metrics.acc") == []


@pytest.mark.parametrize(
    ("goals", "main"), [({}, "val_acc"), ({"loss": "minimize"}, "loss"), ({"gone": "minimize"}, "val_acc")]
)
def test_main_metric_is_the_metric_of_the_sweep_goal_if_logged_and_else_a_validation_metric(
    goals: dict[str, str], main: str
) -> None:
    numbers = dict.fromkeys(("acc", "loss", "val_acc"), (1.0, 1.0, 1.0, 1))
    assert main_metric(MetricSummaries.of(numbers, goals)) == main  # type: ignore[arg-type]
    assert main_metric(MetricSummaries.of({})) is None


def test_resource_usage_has_memory_peaks_and_cpu_seconds_of_all_ranks(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path, "a_1700000000_00000001")
    assert read_resources(folder) == {}
    folder.metrics.mkdir(exist_ok=True)
    line = '{{"name": "rank_{}", "value": {}, "step": {}}}\n'
    text = "".join(
        line.format(name, value, step)
        for step, cpu, memory in [(100, 50, 1.5), (110, 200, 3), (120, 100, 2), (9120, 100, 1)]
        for name, value in [("cpu_percent", cpu), ("memory_gib", memory)]
    )
    (folder.metrics / "load_0.jsonl").write_text(
        text + '{"name": "rank_memory_gib", "value": "much", "step": 1}\n[1]\n{"na'
    )
    (folder.metrics / "load_1.jsonl").write_text(line.format("gpu_memory_gib", 8, 100))
    # 150 CPU seconds: 10 s at 200 %, 10 s at 100 %, and 120 s of a long gap at 100 %.
    assert read_resources(folder) == {"memory_gib": 3, "gpu_memory_gib": 8, "cpu_s": 150.0}
    facts = read_facts(folder)
    assert facts is not None
    assert [field_of(name).get(facts) for name in ("peak_memory", "peak_gpu_memory", "cpu_time")] == [3, 8, 150.0]
