"""Hook for `Run.log` of Weights & Biases and of trackio, which has the same calls.

Offline, the values are otherwise only in a file that no other program reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from paceline.trackers.sink import sink


def listen(module: ModuleType) -> None:
    """Log the numbers of the module's `Run.log` as metrics of this process's run."""
    kind, found = module.Run, sink()
    if found is None:
        return
    log = kind.log
    tracker = module.__name__.partition(".")[0]
    # Name of the first parameter, and of the run's step counter.
    first, count = ("metrics", "_next_step") if tracker == "trackio" else ("data", "step")

    def log_and_keep(self: Any, *args: Any, **options: Any) -> Any:
        data, step = (*args, None, None)[:2]
        data, step = options.get(first, data), options.get("step", step)
        # Before the call, which increments it.
        at = step if step is not None else getattr(self, count, None)
        result = log(self, *args, **options)
        if isinstance(data, Mapping):
            # W&B runs of one process have different names, which are no paths.
            own = getattr(self, "name", None) or getattr(self, "id", None)
            prefix = found.prefix(f"/{str(own).replace('/', '_')}", tracker) if own else ""
            for name, value in flat(data):
                found.log(tracker, prefix + name, value, at)
        return result

    kind.log = log_and_keep


def flat(data: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each value. Nested names have dots, as in W&B."""
    for key, value in data.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        else:
            yield name, value
