"""The writers of TensorBoard's event files that are in Python: torch's SummaryWriter has tensorboard's, tensorboardX and
TensorFlow 1 have their own.

All three have a class EventFileWriter whose add_event gets each Event before it is written, minutes before it can be read in the
file. So a value is in the run as soon as it is logged, and survives a SIGKILL of the worker that the file would not.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from paceline.trackers.event_file import tensor_scalar
from paceline.trackers.sink import Sink, hear

TRACKER = "tensorboard"


def listen(module: ModuleType) -> None:
    """Let the module's writer tell its scalars to this process's run."""
    hear(module.EventFileWriter, "add_event", log_event)


def log_event(to: Sink, writer: Any, event: Any, *args: Any, **options: Any) -> None:
    """Log the scalars of an event_pb2.Event of whichever library."""
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
    # A tensor that has dimensions is a histogram's, an image's or a text's, and may be large.
    if kind == "tensor" and not value.tensor.tensor_shape.dim:
        return tensor_scalar(value.tensor.SerializeToString())
    return None
