"""Loggers that write CSV: Lightning's CSVLogger and Keras's callback of the same name, by what they are given for a line."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from paceline.trackers.sink import sink


def listen(module: ModuleType) -> None:
    """Let the module's logger tell its numbers to this process's run."""
    if hasattr(module, "_ExperimentWriter"):
        _listen_to_lightning(module._ExperimentWriter)
    else:
        _listen_to_keras(module.CSVLogger)


def _listen_to_lightning(kind: Any) -> None:
    found, log_metrics = sink(), kind.log_metrics
    if found is None:
        return

    def log_metrics_and_keep(self: Any, metrics_dict: Any, step: Any = None) -> Any:
        result = log_metrics(self, metrics_dict, step)
        for name, value in dict(metrics_dict).items():
            found.log("lightning", str(name), value, step)
        return result

    kind.log_metrics = log_metrics_and_keep


def _listen_to_keras(kind: Any) -> None:
    found, on_epoch_end = sink(), kind.on_epoch_end
    if found is None:
        return

    def on_epoch_end_and_keep(self: Any, epoch: Any, logs: Any = None) -> Any:
        result = on_epoch_end(self, epoch, logs)
        for name, value in dict(logs or {}).items():
            found.log("keras", str(name), value, epoch)
        return result

    kind.on_epoch_end = on_epoch_end_and_keep
