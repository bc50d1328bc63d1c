"""Hooks for the Python libraries that log numbers: TensorBoard's writers, W&B, trackio, and loggers that write CSV.

TensorBoard: torch's SummaryWriter uses tensorboard's writer; tensorboardX and TensorFlow 1 have their own. In all three,
`EventFileWriter.add_event` gets each Event before it is written, minutes before it is readable in the file. So a value is a
metric at once, and survives a SIGKILL that the file would not. W&B: offline, the values are otherwise only in a file that no
other program reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from paceline.trackers.event_file import tensor_scalar
from paceline.trackers.sink import Sink, hear, sink

TENSORBOARD = "tensorboard"


class _Shape(Protocol):
    dim: Sequence[object]


class _Tensor(Protocol):
    tensor_shape: _Shape

    def SerializeToString(self) -> bytes: ...  # noqa: N802


class _Value(Protocol):
    """A `Summary.Value` of any library's protobuf classes."""

    tag: str
    simple_value: float
    tensor: _Tensor

    def WhichOneof(self, name: str) -> str | None: ...  # noqa: N802


class _Event(Protocol):
    step: int
    wall_time: float


def hear_event_writer(module: ModuleType) -> None:
    """Log the scalars that the module's event file writer receives."""
    hear(module.EventFileWriter, "add_event", log_event)


def log_event(to: Sink, writer: object, event: _Event, *args: object, **options: object) -> None:
    """Log the scalars of an event_pb2.Event."""
    values: Sequence[_Value] = getattr(getattr(event, "summary", None), "value", ())
    numbers = [(value.tag, number) for value in values if (number := _number(value)) is not None]
    prefix = to.prefix(_folder(writer)) if numbers else ""
    for tag, number in numbers:
        to.log(TENSORBOARD, prefix + tag, number, event.step, event.wall_time or None)


def _folder(writer: object) -> str:
    get = getattr(writer, "get_logdir", None)
    return str(vars(writer)["_logdir"] if get is None else get())


def _number(value: _Value) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    # A tensor with dimensions is a histogram, image or text, and may be large.
    if kind == "tensor" and not value.tensor.tensor_shape.dim:
        return tensor_scalar(value.tensor.SerializeToString())
    return None


def hear_csv_logger(module: ModuleType) -> None:
    """Log the numbers of Lightning's CSVLogger, or of Keras's."""
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
    """Log the numbers of `Run.log` of W&B or trackio."""
    own = sink()
    if own is None:
        return
    kind = module.Run
    log = kind.log
    tracker = module.__name__.partition(".")[0]
    # Names of the first parameter of `log` and of the run's step counter.
    first, count = ("metrics", "_next_step") if tracker == "trackio" else ("data", "step")

    def log_and_keep(run: object, *args: Any, **options: Any) -> object:
        data, step = (*args, None, None)[:2]
        data, step = options.get(first, data), options.get("step", step)
        # Read the step counter before `log`, which increments it.
        at = getattr(run, count, None) if step is None else step
        result = log(run, *args, **options)
        if isinstance(data, Mapping):
            # A process may have several W&B runs: use their names, which are no paths, as folders.
            name_of_run = getattr(run, "name", None) or getattr(run, "id", None)
            prefix = own.prefix(f"/{str(name_of_run).replace('/', '_')}", tracker) if name_of_run else ""
            for name, value in flat(data):
                own.log(tracker, prefix + name, value, at)
        return result

    kind.log = log_and_keep


def flat(data: Mapping[object, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield (name, value) of nested mappings; dots join the keys of a name."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
