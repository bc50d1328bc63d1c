"""Transformers: from version 5 its Trainer reports to nobody unless asked, so every Trainer of a worker gets a callback.

The same callback can be given by hand, `Trainer(..., callbacks=[PacelineCallback()])`, where the worker was told not to listen.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from transformers import TrainerCallback  # type: ignore[import-not-found,unused-ignore]

from paceline.trackers.sink import sink

__all__ = ["PacelineCallback", "listen"]

TRACKER = "transformers"
#: Keys of a Trainer's logs that are not about the training.
_NOT_ABOUT_IT = ("total_flos",)


def listen(module: ModuleType) -> None:
    """Add the callback to those that each Trainer begins with."""
    if sink() is not None:
        module.DEFAULT_CALLBACKS.append(PacelineCallback)


class PacelineCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Logs a Trainer's numbers as metrics of the run, by the global step: "loss", "eval_loss", "learning_rate" and so on.

    The first process alone logs, as it does for all of Transformers' own callbacks. Outside a run it does nothing.
    """

    #: Those that were logged last, of all of these callbacks: a Trainer that was given one has two.
    _last: Any = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        found = sink()
        if found is None or not state.is_world_process_zero or not logs or logs is PacelineCallback._last:
            return
        PacelineCallback._last = logs
        names = [name for name in logs if name not in _NOT_ABOUT_IT]
        # Each of several Trainers, one a fold, has an output folder of its own.
        folder = getattr(args, "output_dir", None)
        prefix = found.prefix(str(folder), TRACKER) if folder else ""
        # The names under which its callbacks for TensorBoard and W&B tell the same values.
        found.claim(TRACKER, (prefix + rewritten(name) for name in names))
        for name in names:
            found.log(TRACKER, prefix + name, logs[name], state.global_step)


def rewritten(name: str) -> str:
    """What `transformers.integrations.rewrite_logs` makes of a name."""
    for part in ("eval", "test"):
        if name.startswith(f"{part}_"):
            return f"{part}/{name[len(part) + 1 :]}"
    return f"train/{name}"
