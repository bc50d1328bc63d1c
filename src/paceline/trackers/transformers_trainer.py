"""A callback for Transformers, added to every Trainer of a worker.

Since version 5, a Trainer reports to no tracker by default. If a worker's hooks are disabled, pass the callback yourself:
`Trainer(..., callbacks=[PacelineCallback()])`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from transformers import TrainerCallback  # type: ignore[import-not-found,unused-ignore]

from paceline.trackers.sink import sink

__all__ = ["PacelineCallback", "listen"]

TRACKER = "transformers"
#: Keys in a Trainer's logs that are not metrics.
_NOT_ABOUT_IT = ("total_flos",)


def listen(module: ModuleType) -> None:
    """Add PacelineCallback to the default callbacks of every Trainer of this process."""
    if sink() is not None:
        module.DEFAULT_CALLBACKS.append(PacelineCallback)


class _State(Protocol):
    is_world_process_zero: bool
    global_step: int


class PacelineCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """A callback that logs a Trainer's numbers as metrics.

    The step of a metric is the Trainer's global step. Only the first process logs, as in Transformers' own callbacks. Outside a
    run, the callback does nothing.
    """

    #: The logs that an object of this class has stored last: two objects of one Trainer receive the same logs.
    _last: Mapping[str, object] | None = None

    def on_log(
        self, args: object, state: _State, control: object, logs: Mapping[str, object] | None = None, **others: object
    ) -> None:
        own = sink()
        if own is None or not state.is_world_process_zero or not logs or logs is PacelineCallback._last:
            return
        PacelineCallback._last = logs
        names = [name for name in logs if name not in _NOT_ABOUT_IT]
        # A script may have several Trainers, such as one for each fold. Each has its own output folder.
        folder = getattr(args, "output_dir", None)
        prefix = own.prefix(str(folder), TRACKER) if folder else ""
        # Claim the names, so that the Trainer's own callbacks for TensorBoard and W&B do not log these values again.
        own.claim(TRACKER, (prefix + rewritten(name) for name in names))
        for name in names:
            own.log(TRACKER, prefix + name, logs[name], state.global_step)


def rewritten(name: str) -> str:
    """Return a metric's name as `transformers.integrations.rewrite_logs` changes it."""
    for part in ("eval", "test"):
        if name.startswith(f"{part}_"):
            return f"{part}/{name[len(part) + 1 :]}"
    return f"train/{name}"
