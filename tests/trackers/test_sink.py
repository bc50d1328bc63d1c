"""Where the values of all trackers arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.runs import metrics
from paceline.runs.context import WorkerContext
from paceline.runs.metrics import MetricLog
from paceline.trackers.sink import Sink


@pytest.fixture
def to(tmp_path: Path) -> Iterator[Sink]:
    metrics.logged_here.clear()
    yield Sink(WorkerContext(tmp_path, rank=1, world_size=2, attempt=1))
    metrics.logged_here.clear()


def test_metric_logged_by_two_trackers_is_kept_only_from_the_first(to: Sink) -> None:
    to.log("lightning", "loss", 1.0, 0)
    to.log("tensorboard", "loss", 1.0, 0)
    to.claim("transformers", ["train/loss"])
    to.log("tensorboard", "train/loss", 1.0, 0)
    own = MetricLog(to.folder.metric_log(1))
    own.scalar("mine", 2.0)
    to.log("tensorboard", "mine", 2.0, 0)
    own.scalar("loss", 0.5, 1)
    to.log("lightning", "loss", 0.5, 1)
    assert metrics.read(to.folder.metrics) == {"loss": [1.0, 0.5], "mine": 2.0}


def test_sink_logs_numbers_with_step_and_time_and_ignores_other_values(to: Sink) -> None:
    class Scalar:
        def item(self) -> float:
            return 0.25

    for value in ("text", True, [1, 2], None, object()):
        to.log("wandb", "other", value)
    to.log("wandb", "loss", Scalar(), step=3, time_s=12.5)
    to.log("wandb", "loss", float("nan"), step=4)
    ((name, entries),) = metrics.entries_by_name(to.folder.metrics).items()
    assert name == "loss"
    assert entries[0] == {"name": "loss", "value": 0.25, "time": 12.5, "step": 3}
    assert entries[1]["value"] != entries[1]["value"]


def test_full_disk_is_reported_once_and_the_script_continues(
    to: Sink, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricLog, "scalar", full)
    to.log("wandb", "loss", 1.0)
    to.log("wandb", "loss", 2.0)
    said = "paceline: values of wandb are not kept as metrics: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == said


def test_event_file_folders_get_distinct_prefixes(to: Sink, tmp_path: Path) -> None:
    assert [to.prefix(f"runs/{name}") for name in ("a", "a/loss_train", "a/1700000000.25", "b", "a", "b/train")] == [
        "",
        "loss_train/",
        "",
        "b/",
        "",
        "b/train/",
    ]
    assert to.prefix(str(tmp_path / "runs" / "a")) == ""


def test_keras_callback_folders_get_train_and_validation_prefixes(to: Sink) -> None:
    assert [to.prefix(f"logs/{name}") for name in ("train", "validation", "other")] == ["train/", "validation/", ""]


FOLDS = [f"logs/{fold}/tensorboard/version_0" for fold in range(3)]


@pytest.mark.promise("several-trainings-one-process-curves")
@pytest.mark.parametrize(
    ("folders", "prefixes"),
    [
        (FOLDS, ["", "1/", "2/"]),
        ([f"multirun/2026-11-28/06-20-11/{job}/tb" for job in range(3)], ["", "1/", "2/"]),
        ([f"out/fold{fold}/runs/Nov28_06-2{fold}-11_host" for fold in range(2)], ["", "fold1/"]),
        (["lightning_logs/version_0", "lightning_logs/version_1"], ["", "version_1/"]),
        (["runs/Nov28_06-20-11_host", "runs/Nov28_06-21-11_host"], ["", "Nov28_06-21-11_host/"]),
        (["f0/train", "f0/val", "f1/train", "f1/val"], ["train/", "val/", "f1/train/", "f1/val/"]),
        (["a/x/v", "b/x/v", "a/b/v"], ["", "b/", "b/v/"]),
    ],
)
def test_metric_prefix_is_the_differing_part_of_the_path(to: Sink, folders: list[str], prefixes: list[str]) -> None:
    # Regression: the metrics of three folds, each in a folder named `version_0`, were merged into one curve.
    assert [to.prefix(folder) for folder in folders] == prefixes
    assert [to.prefix(folder) for folder in folders] == prefixes


def test_metric_prefixes_are_shared_by_processes_and_trackers_of_a_rank(to: Sink) -> None:
    assert [to.prefix(folder) for folder in FOLDS[:2]] == ["", "1/"]
    assert [to.prefix(f"csv/{fold}", "lightning") for fold in range(2)] == ["", "1/"]
    other = Sink(to.context)
    assert [other.prefix(folder) for folder in FOLDS] == ["", "1/", "2/"]


@pytest.mark.promise("several-trainings-one-process-curves")
@pytest.mark.parametrize(
    ("first", "second", "prefixes"),
    [
        # The second training repeats the last fold, or all folds: under the same names, with the next version, or at another
        # time.
        (FOLDS, FOLDS[2:], ["2/"]),
        (FOLDS[:2], FOLDS[2:], ["2/"]),
        (FOLDS, [folder.replace("version_0", "version_1") for folder in FOLDS], ["", "1/", "2/"]),
        (["l/version_0", "l/version_1"], ["l/version_2", "l/version_3"], ["", "version_1/"]),
        (["m/2026-11-28/06-20-11/0", "m/2026-11-28/06-20-11/1"], ["m/2026-11-29/01-00-00/1"], ["1/"]),
        (["runs/happy-cat"], ["runs/sad-dog"], [""]),
    ],
)
def test_next_attempt_keeps_the_metric_prefixes(
    to: Sink, first: list[str], second: list[str], prefixes: list[str]
) -> None:
    for folder in first:
        to.prefix(folder)
    again = Sink(dataclasses.replace(to.context, attempt=2))
    assert [again.prefix(folder) for folder in second] == prefixes
