"""Hooks for loggers that write CSV: Lightning's CSVLogger and Keras's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from paceline.trackers.sink import Sink, hear


def listen(module: ModuleType) -> None:
    """Log the numbers of the module's logger as metrics of this process's run."""
    if hasattr(module, "_ExperimentWriter"):
        hear(module._ExperimentWriter, "log_metrics", _of_lightning)
    else:
        hear(module.CSVLogger, "on_epoch_end", _of_keras)


def _of_lightning(to: Sink, writer: Any, metrics_dict: Any, step: Any = None) -> None:
    folder = getattr(writer, "log_dir", None)
    prefix = to.prefix(str(folder), "lightning") if folder is not None else ""
    for name, value in dict(metrics_dict).items():
        to.log("lightning", f"{prefix}{name}", value, step)


def _of_keras(to: Sink, callback: Any, epoch: Any, logs: Any = None) -> None:
    file = getattr(callback, "filename", None)
    prefix = to.prefix(str(file), "keras").replace(".csv/", "/") if file is not None else ""
    for name, value in dict(logs or {}).items():
        to.log("keras", f"{prefix}{name}", value, epoch)
