"""The way in which tensors are reduced: what every framework's functions are told of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.compat.horovod.common.ops import ENGINE_NAMES
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set


class How(NamedTuple):
    """The way in which tensors are reduced."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set

    def engine(self) -> dict[str, Any]:
        """The arguments of the engine's reductions that say it."""
        op, prescale, postscale, _ = self
        return {"op": ENGINE_NAMES[op], "prescale": float(prescale), "postscale": float(postscale)}
