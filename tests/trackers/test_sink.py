"""Where the values of all trackers arrive."""

from __future__ import annotations

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


def test_a_name_belongs_to_whoever_logs_it_first_and_to_the_script_before_all(to: Sink) -> None:
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


def test_numbers_are_kept_with_their_step_and_time_and_nothing_else_is(to: Sink) -> None:
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


def test_a_full_disk_is_said_once_and_the_script_goes_on(
    to: Sink, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricLog, "scalar", full)
    to.log("wandb", "loss", 1.0)
    to.log("wandb", "loss", 2.0)
    said = "paceline: values of wandb are not kept as metrics: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == said


def test_folders_of_event_files_are_told_apart_by_what_stands_before_their_tags(to: Sink, tmp_path: Path) -> None:
    assert [to.prefix(f"runs/{name}") for name in ("a", "a/loss_train", "a/1700000000.25", "b", "a", "b/train")] == [
        "",
        "loss_train/",
        "",
        "b/",
        "",
        "b/train/",
    ]
    assert to.prefix(str(tmp_path / "runs" / "a")) == ""


def test_the_folders_of_keras_s_callback_say_train_and_validation(to: Sink) -> None:
    assert [to.prefix(f"logs/{name}") for name in ("train", "validation", "other")] == ["train/", "validation/", ""]
