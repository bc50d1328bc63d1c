"""Searches of runs through MLflow give what MLflow's own code finds among all runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import states, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from tests.helpers import make_job, make_run
from tests.late import late

search_utils = late("mlflow.utils.search_utils")
search_module = late("paceline.trackers.mlflow.search")
view = late("paceline.trackers.mlflow.view")

NAMES = {"a", "b"}
FILTERS = [
    None,
    "metrics.acc > 0.6",
    "metrics.acc = 0.25",
    "metrics.flag = 1",
    "params.lr = '0.1'",
    "params.lr = '1e-1'",
    "params.lr != '0.1'",
    "params.`argument 1` = 'lr=0.2'",
    "params.amp = ''",
    "params.depth = '18' and metrics.acc < 0.5",
    "params.lr = '0.2'",
    "params.lr LIKE '0.%'",
    "params.nothing = 'nan'",
    "tags.team = 'vision'",
    "tags.team = 'vision' and status = 'FAILED'",
    "tags.`mlflow.runName` = 'mine'",
    "attributes.status = 'RUNNING'",
    "attributes.status != 'FINISHED'",
    "attributes.run_name = 'mine'",
    "attributes.run_id = 'a_1700000001_00000001'",
    "attributes.run_id IN ('a_1700000001_00000001', 'b_1700000003_00000001')",
    "attributes.start_time > 0",
]
ORDERS = [
    None,
    ["attributes.start_time ASC"],
    ["start_time DESC"],
    ["metrics.acc DESC"],
    ["params.lr ASC", "start_time DESC"],
    ["tags.team"],
]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Runs that differ in what the facts and MLflow make of them."""
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    jobs = [("--lr", "0.1", "--amp"), ("--lr", "1e-1"), ("--lr=0.1", "lr=0.2"), ("--depth", "18", "--lr", "0.2")]
    for number, arguments in enumerate(jobs):
        name = "ab"[number % 2]
        status = [states.COMPLETED, states.FAILED, states.QUEUED, states.COMPLETED][number]
        folder, fd = make_run(tmp_path, f"{name}_170000000{number}_00000001", status, job=make_job(arguments=arguments))
        if status in states.TERMINAL:
            os.close(fd)
        log = MetricLog(folder.metric_log(0))
        # MLflow takes the value of the greatest step, and not of the last line.
        log.scalar("acc", 0.25 * number, step=10)
        log.scalar("acc", 0.9, step=5)
        log.scalar("flag", number % 2 == 0)
        log.close()
        other = MetricLog(folder.metric_log(1))
        other.scalar("acc", 0.75, step=10 + number % 2)
        other.close()
        tags_and_properties.set_tags(folder.notes, {"team": ("vision", "text")[number // 2]})
    tags_and_properties.set_name(folder.notes, "display_name", "mine")
    tags_and_properties.add_properties(folder.notes, {"lr": "0.2"})
    make_run(tmp_path, "other_1700000005_00000001", states.COMPLETED)
    return tmp_path


def _ids(runs: list[Any]) -> list[str]:
    return [run.info.run_id for run in runs]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("text", FILTERS)
def test_search_finds_the_runs_that_mlflow_would_find(
    runs_dir: Path, text: str | None, order: list[str] | None
) -> None:
    folders = [RunFolder(path) for path in runs_dir.iterdir()]
    runs = [run for run in map(view.run, folders) if run.info.experiment_id in NAMES]
    expected = _ids(search_utils.SearchUtils.sort(search_utils.SearchUtils.filter(runs, text), order))
    assert _ids(search_module.search(runs_dir, NAMES, text, order, 100)) == expected
    assert text is not None or len(expected) == 4


def test_search_reads_only_runs_that_can_match(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = view.run

    def counted(folder: RunFolder) -> Any:
        read.append(folder.run_id)
        return real(folder)

    monkeypatch.setattr(view, "run", counted)
    monkeypatch.setattr(search_module, "_BATCH", 1)
    assert len(search_module.search(runs_dir, NAMES, "tags.team = 'vision' and params.lr = '1e-1'", None, 100)) == 1
    assert len(read) == 2
    read.clear()
    # A request for a page with one run reads only one run.
    search_module.search(runs_dir, NAMES, None, ["start_time DESC"], 1)
    assert len(read) == 1


def test_search_finds_a_run_by_a_value_changed_just_before(runs_dir: Path) -> None:
    assert search_module.search(runs_dir, NAMES, "tags.seen = 'yes'", None, 100) == []
    folder = RunFolder(runs_dir / "a_1700000000_00000001")
    tags_and_properties.set_tags(folder.notes, {"seen": "yes"})
    assert _ids(search_module.search(runs_dir, NAMES, "tags.seen = 'yes'", None, 100)) == [folder.run_id]


def test_invalid_search_filter_raises_the_exception_class_of_mlflow(runs_dir: Path) -> None:
    with pytest.raises(late("mlflow.exceptions").MlflowException, match="Invalid"):
        search_module.search(runs_dir, NAMES, "speed ~ 3", None, 100)
