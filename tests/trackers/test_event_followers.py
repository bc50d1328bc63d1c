"""Event files of programs that are no Python, taken up at the end of each attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.runs import metrics
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.trackers import event_followers
from paceline.trackers.export import event_writer


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    metrics.logged_here.clear()
    return RunFolder(tmp_path / "ws/runs/digits_1_2")


def written(folder: RunFolder, steps: range, *, at_s: float, name: str = "logs") -> None:
    """A file of the program's with `loss` of these steps, a second apart."""
    write = event_writer(folder.work / name)
    for step in steps:
        write("loss", step, step / 2, at_s + step)
    write(None, 0, 0.0, 0.0)


def taken_up(folder: RunFolder, attempt: int) -> dict[str, object]:
    event_followers.take_up(folder, attempt, since=0.0, variables={})
    return metrics.read(folder.metrics)


@pytest.mark.promise("program-without-python-keeps-metrics")
def test_event_files_of_a_non_python_program_become_metrics_in_every_attempt(folder: RunFolder) -> None:
    # Regression: values of later attempts were lost: names from the first attempt counted as names of metrics that the
    # program logs itself.
    written(folder, range(3), at_s=100.0)
    assert taken_up(folder, 1) == {"loss": [0.0, 0.5, 1.0]}
    written(folder, range(2, 5), at_s=200.0)
    # The first event file still exists, but its values are not taken a second time.
    assert taken_up(folder, 2) == {"loss": [0.0, 0.5, 1.0, 1.5, 2.0]}
    second = metrics.placed_entries_by_name(folder.metrics, attempts=[2])["loss"]
    assert [entry["step"] for entry in second] == [2, 3, 4]


@pytest.mark.parametrize("step", [1, None])
def test_event_file_value_that_is_already_a_metric_is_skipped(folder: RunFolder, step: int | None) -> None:
    MetricLog(folder.metric_log(0, 1), of_tracker=True).scalar("loss", 0.5, step, 101.0)
    written(folder, range(1, 2), at_s=100.0)
    assert taken_up(folder, 1) == {"loss": 0.5}


def test_metrics_of_a_second_event_file_folder_get_a_prefix_from_its_path(folder: RunFolder) -> None:
    for fold in range(2):
        written(folder, range(2), at_s=100.0 * fold, name=f"logs/{fold}/version_0")
    assert taken_up(folder, 1) == {"loss": [0.0, 0.5], "1/loss": [0.0, 0.5]}
