"""The way in which tensors, and gradients, are reduced: what every framework's functions are told of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from paceline.compat.horovod.common.arguments import check_groups, check_predivide
from paceline.compat.horovod.common.compression import NoneCompressor
from paceline.compat.horovod.common.ops import ENGINE_NAMES, Average
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


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The way in which gradients are reduced.

    gradient_predivide_factor: averages are divided by this before the sum, and by the rest of the size after it.
    groups: so many groups of gradients, each reduced as one, or lists of variables.
    sparse_as_dense: sparse gradients are made dense, and reduced as the others.
    scale_local_gradients: gradients that stay on their rank are divided by the number of ranks.
    prefix: begins the names under which gradients meet those of the other ranks.

    Raises:
        ValueError: what doesn't go together.
    """

    op: int = Average
    compression: Any = NoneCompressor
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    prefix: str = "DistributedOptimizer"

    def __post_init__(self) -> None:
        if self.op not in ENGINE_NAMES:
            raise ValueError(f"op={self.op!r} is no operation of Horovod's. Give hvd.Average, hvd.Sum or hvd.Adasum.")
        check_predivide(self.gradient_predivide_factor, self.op)
        if self.groups is not None:
            check_groups(self.groups)

    @cached_property
    def how(self) -> How:
        """The way for dense gradients."""
        # The two factors cancel each other; the sum in between is smaller, so that float16 does not overflow.
        return How(self.op, 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor, self.process_set)
