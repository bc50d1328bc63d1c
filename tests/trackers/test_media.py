"""Images, histograms, texts and HTML that other trackers log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.runs import metrics
from paceline.runs.context import WorkerContext
from paceline.runs.metrics import MetricLog, entries_by_name
from paceline.trackers import libraries, sink
from paceline.trackers.sink import Sink


@pytest.fixture
def to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    metrics.logged_here.clear()
    made = Sink(WorkerContext(tmp_path, rank=1, world_size=2, attempt=1))
    monkeypatch.setattr(sink, "_sink", made)
    monkeypatch.setattr(sink, "_is_looked_for", True)
    yield made
    metrics.logged_here.clear()


def entries(to: Sink) -> dict[str, tuple[Any, Any, Any]]:
    """Kind, value and step of the last entry of each metric."""
    found = entries_by_name(to.folder.metrics)
    return {name: (one[-1].get("kind"), one[-1].get("value"), one[-1].get("step")) for name, one in found.items()}


def test_images_histograms_and_texts_of_a_summarywriter_become_metrics(to: Sink) -> None:
    summary = pytest.importorskip("torch.utils.tensorboard.summary")
    numpy = pytest.importorskip("numpy")
    proto = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    writer = SimpleNamespace(get_logdir=lambda: "tb")
    for made in (
        summary.image("sample", numpy.zeros((3, 4, 5), "uint8"), dataformats="CHW"),
        summary.histogram("weights", numpy.array([0.0, 0.1, 0.2, 1.0]), bins=[0.0, 0.5, 1.0]),
        summary.text("note", "it *works*"),
        summary.scalar("loss", 0.5),
    ):
        libraries.log_event(to, writer, proto.Event(step=3, wall_time=1.0, summary=made))
    found = entries(to)
    kind, name, step = found.pop("sample")
    assert (kind, step) == ("image", 3)
    assert (to.folder.artifacts / name).read_bytes().startswith(b"\x89PNG")
    assert found.pop("note/text_summary") == ("text", "it *works*", 3)
    kind, histogram, step = found.pop("weights")
    assert (kind, step, sum(histogram["counts"])) == ("histogram", 3, 4)
    assert histogram["edges"] == sorted(histogram["edges"])
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1
    assert found == {"loss": (None, 0.5, 3)}


def test_wandb_media_become_metrics(to: Sink) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2))

    class Run:
        name, step = None, 4

        def log(self, data: dict[str, object]) -> None:
            pass

    libraries.hear_wandb(SimpleNamespace(Run=Run, __name__="wandb.sdk.wandb_run"))  # type: ignore[arg-type]
    Run().log(
        {
            "image": SimpleNamespace(image=image),
            "histogram": SimpleNamespace(histogram=[1, 2], bins=[0.0, 1.0, 2.0]),
            "page": SimpleNamespace(html="<b>x</b>"),
            "nothing": SimpleNamespace(),
            "loss": 0.5,
        }
    )
    found = entries(to)
    assert {name: kind for name, (kind, _, _) in found.items()} == {
        **{"image": "image", "histogram": "histogram"},
        **{"page": "html", "loss": None},
    }
    assert found["histogram"][1:] == ({"counts": [1, 2], "edges": [0.0, 1.0, 2.0]}, 4)


def test_tracker_media_that_are_broken_or_named_like_an_existing_metric_are_dropped(to: Sink) -> None:
    own = MetricLog(to.folder.metric_log(1))
    own.scalar("mine", 2.0)
    to.keep("wandb", "mine", libraries.Html("x"))
    to.keep("wandb", "bad", libraries.Html(5))  # type: ignore[arg-type]
    assert entries(to) == {"mine": (None, 2.0, None)}
