"""Weights & Biases: what `wandb.log` and `Run.log` are given. Offline it is only in a file that nobody else reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from paceline.trackers.sink import sink

TRACKER = "wandb"


def listen(module: ModuleType) -> None:
    """Let the module's `Run.log` tell its numbers to this process's run."""
    kind, found = module.Run, sink()
    if found is None:
        return
    log = kind.log

    def log_and_keep(self: Any, data: Any, step: Any = None, *args: Any, **options: Any) -> Any:
        # Before the call, which counts it up.
        at = step if step is not None else getattr(self, "step", None)
        result = log(self, data, step, *args, **options)
        if isinstance(data, Mapping):
            # Several W&B runs of one process have names of their own, which are no paths.
            own = getattr(self, "name", None) or getattr(self, "id", None)
            prefix = found.prefix(f"/{str(own).replace('/', '_')}", TRACKER) if own else ""
            for name, value in flat(data):
                found.log(TRACKER, prefix + name, value, at)
        return result

    kind.log = log_and_keep


def flat(data: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of each value, those of a dict in a dict with a dot between, as W&B names them."""
    for key, value in data.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        else:
            yield name, value
