"""Hooks for the Python writers of TensorBoard's event files.

torch's SummaryWriter uses tensorboard's writer; tensorboardX and TensorFlow 1 have their own. In all three,
`EventFileWriter.add_event` gets each Event before it is written, minutes before it is readable in the file. So a value is a
metric at once, and survives a SIGKILL that the file would not.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from paceline.trackers.event_file import tensor_scalar
from paceline.trackers.sink import Sink, hear

TRACKER = "tensorboard"


def listen(module: ModuleType) -> None:
    """Log the scalars of the module's writer as metrics of this process's run."""
    hear(module.EventFileWriter, "add_event", log_event)


def log_event(to: Sink, writer: Any, event: Any, *args: Any, **options: Any) -> None:
    """Log the scalars of an event_pb2.Event of any of these libraries."""
    values = getattr(getattr(event, "summary", None), "value", ())
    prefix = None
    for value in values:
        number = _number(value)
        if number is None:
            continue
        if prefix is None:
            prefix = to.prefix(_folder(writer))
        to.log(TRACKER, prefix + value.tag, number, event.step, event.wall_time or None)


def _folder(writer: Any) -> str:
    get = getattr(writer, "get_logdir", None)
    return str(get() if get is not None else writer._logdir)


def _number(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    # A tensor with dimensions is a histogram, image or text, and may be large.
    if kind == "tensor" and not value.tensor.tensor_shape.dim:
        return tensor_scalar(value.tensor.SerializeToString())
    return None
