"""Hooks for trackers' Python libraries: TensorBoard's writers, W&B, trackio, and CSV loggers.

torch's SummaryWriter uses tensorboard's writer, while tensorboardX and TensorFlow 1 have their own. In all three
libraries, `EventFileWriter.add_event` gets each Event, minutes before the writer flushes the Event to its file.
Paceline logs the value in this call, so that the value survives if the process is killed before the flush.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from paceline.runs.media import Html, Media, MediaEntry, media_of
from paceline.system.serialization import flat
from paceline.trackers.event_file import tensor_scalar
from paceline.trackers.sink import Sink, hear, sink

TENSORBOARD = "tensorboard"


class _Shape(Protocol):
    dim: Sequence[object]


class _Tensor(Protocol):
    tensor_shape: _Shape
    string_val: Sequence[bytes]

    def SerializeToString(self) -> bytes: ...  # noqa: N802


class _Picture(Protocol):
    encoded_image_string: bytes


class _Histogram(Protocol):
    min: float
    max: float
    bucket_limit: Sequence[float]
    bucket: Sequence[float]


class _Plugin(Protocol):
    plugin_name: str


class _Metadata(Protocol):
    plugin_data: _Plugin


class _Value(Protocol):
    tag: str
    simple_value: float
    tensor: _Tensor
    image: _Picture
    histo: _Histogram
    metadata: _Metadata

    def WhichOneof(self, name: str) -> str | None: ...  # noqa: N802


class _Event(Protocol):
    step: int
    wall_time: float


def hear_event_writer(module: ModuleType) -> None:
    """Hook a module's event file writer, to log its values as metrics."""
    hear(module.EventFileWriter, "add_event", log_event)


def log_event(to: Sink, writer: object, event: _Event, *args: object, **options: object) -> None:
    """Log the scalars, images, histograms and texts of an event_pb2.Event."""
    values: Sequence[_Value] = getattr(getattr(event, "summary", None), "value", ())
    numbers = [(value.tag, number) for value in values if (number := _number(value)) is not None]
    others = [(value.tag, media) for value in values if (media := _media(value)) is not None]
    prefix = to.prefix(_folder(writer)) if numbers or others else ""
    for tag, number in numbers:
        to.log(TENSORBOARD, prefix + tag, number, event.step, event.wall_time or None)
    for tag, media in others:
        to.keep(TENSORBOARD, prefix + tag, media, event.step)


def _folder(writer: object) -> str:
    get = getattr(writer, "get_logdir", None)
    return str(vars(writer)["_logdir"] if get is None else get())


def _number(value: _Value) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    # Keep only a tensor without dimensions. A tensor with dimensions is a histogram, image or text, and may be large.
    if kind == "tensor" and not value.tensor.tensor_shape.dim:
        return tensor_scalar(value.tensor.SerializeToString())
    return None


@dataclass(frozen=True)
class Converted(Media):
    """An image, histogram or text that already is a metric log's entry."""

    converted: MediaEntry

    def entry(self, name: str) -> MediaEntry:
        return self.converted


def _media(value: _Value) -> Media | None:
    match value.WhichOneof("value"):
        case "image":
            data = value.image.encoded_image_string
            ending = ".gif" if data.startswith(b"GIF8") else ".png"
            return Converted(MediaEntry("image", source=lambda path: path.write_bytes(data), ending=ending))
        case "histo":
            return Converted(MediaEntry("histogram", _of_buckets(value.histo)))
        case "tensor" if value.metadata.plugin_data.plugin_name == "text":
            return Converted(MediaEntry("text", b"\n".join(value.tensor.string_val).decode("utf-8", "replace")))
    return None


def _of_buckets(histo: _Histogram) -> dict[str, list[float]]:
    limits = [min(max(limit, histo.min), histo.max) for limit in histo.bucket_limit]
    return {"counts": [*histo.bucket], "edges": [histo.min, *limits]}


def hear_csv_logger(module: ModuleType) -> None:
    """Hook Lightning's or Keras's CSVLogger, to log its numbers as metrics."""
    if hasattr(module, "_ExperimentWriter"):
        hear(module._ExperimentWriter, "log_metrics", _of_lightning)
    else:
        hear(module.CSVLogger, "on_epoch_end", _of_keras)


def _of_lightning(to: Sink, writer: object, metrics_dict: Mapping[str, object], step: int | None = None) -> None:
    folder = getattr(writer, "log_dir", None)
    prefix = to.prefix(str(folder), "lightning") if folder is not None else ""
    for name, value in metrics_dict.items():
        to.log("lightning", f"{prefix}{name}", value, step)


def _of_keras(to: Sink, callback: object, epoch: int, logs: Mapping[str, object] | None = None) -> None:
    file = getattr(callback, "filename", None)
    prefix = to.prefix(str(file), "keras").replace(".csv/", "/") if file is not None else ""
    for name, value in (logs or {}).items():
        to.log("keras", f"{prefix}{name}", value, epoch)


def hear_wandb(module: ModuleType) -> None:
    """Hook `Run.log` of W&B or trackio, to log its values as metrics."""
    own = sink()
    if own is None:
        return
    kind = module.Run
    log = kind.log
    tracker = module.__name__.partition(".")[0]
    # Name of the first parameter of the tracker's function `log`; name of the run's attribute that counts steps.
    first, count = ("metrics", "_next_step") if tracker == "trackio" else ("data", "step")

    def log_and_keep(run: object, *args: Any, **options: Any) -> object:
        data, step = (*args, None, None)[:2]
        data, step = options.get(first, data), options.get("step", step)
        # Read the step counter before `log`, which increments it.
        at = getattr(run, count, None) if step is None else step
        result = log(run, *args, **options)
        if isinstance(data, Mapping):
            # A process may have several W&B runs, so put the run's name first. Replace slashes: the name is not a path.
            name_of_run = getattr(run, "name", None) or getattr(run, "id", None)
            prefix = own.prefix(f"/{str(name_of_run).replace('/', '_')}", tracker) if name_of_run else ""
            for name, value in flat(data):
                own.log(tracker, prefix + name, value, at)
                if (media := _of_wandb(value)) is not None:
                    own.keep(tracker, prefix + name, media, at)
        return result

    kind.log = log_and_keep


def _of_wandb(value: object) -> Media | None:
    """Return W&B's Image, Html or Histogram as media; None for other values."""
    if hasattr(value, "histogram") and hasattr(value, "bins"):
        return Converted(MediaEntry("histogram", {"counts": [*value.histogram], "edges": [*value.bins]}))
    if isinstance(html := getattr(value, "html", None), str):
        return Html(html)
    return media_of(getattr(value, "image", None)) or media_of(value)
