"""Loggers that write CSV: Lightning's CSVLogger and Keras's callback of the same name, by what they are given for a line."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from paceline.trackers.sink import Sink, hear


def listen(module: ModuleType) -> None:
    """Let the module's logger tell its numbers to this process's run."""
    if hasattr(module, "_ExperimentWriter"):
        hear(module._ExperimentWriter, "log_metrics", _of_lightning)
    else:
        hear(module.CSVLogger, "on_epoch_end", _of_keras)


def _of_lightning(to: Sink, writer: Any, metrics_dict: Any, step: Any = None) -> None:
    for name, value in dict(metrics_dict).items():
        to.log("lightning", str(name), value, step)


def _of_keras(to: Sink, callback: Any, epoch: Any, logs: Any = None) -> None:
    for name, value in dict(logs or {}).items():
        to.log("keras", str(name), value, epoch)
