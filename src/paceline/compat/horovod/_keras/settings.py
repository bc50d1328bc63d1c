"""The settings of a DistributedOptimizer, as the script has given them, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from paceline.compat.horovod.common.ops import Average, Sum
from paceline.compat.horovod.common.reduction import Reduction


@dataclass(frozen=True, kw_only=True)
class KerasSettings(Reduction):
    """The treatment of gradients between the backward pass and the update.

    passes: gradients of so many backward passes are added up, and averaged too with `average_passes`.
    local_layers: layers whose gradients stay on their rank; local_variables: keys (`key_of`) of single variables.
    """

    passes: int = 1
    average_passes: bool = False
    local_layers: tuple[Any, ...] = ()
    local_variables: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum):
            raise ValueError(f"op={self.op!r}: gradients can be reduced by op=hvd.Average or op=hvd.Sum in Keras.")
        super().__post_init__()
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step={self.passes}: it must be at least 1.")

    def local_keys(self) -> set[int]:
        """The keys of all variables that stay local, those of layers that were built meanwhile among them."""
        weights = (weight for layer in self.local_layers for weight in layer.trainable_weights)
        return self.local_variables | {key_of(weight) for weight in weights}


def key_of(variable: Any) -> int:
    """A key that tells a variable from others. Keras's own object and the backend's variable in it count as one."""
    return id(getattr(variable, "_value", variable))


def shared_name(place: int, variable: Any) -> str:
    """A name for the variable's gradient that is the same on every rank: its place among the optimizer's variables, and
    the last part of its path.

    The rest of the path may differ. Keras numbers layers by how many were there before them in the process, and those of
    a model that was read from a file lack the names of what is around them.
    """
    name = str(getattr(variable, "path", None) or variable.name).removesuffix(":0").rsplit("/", 1)[-1]
    return f"{place}.{re.sub(r'_[0-9]+$', '', name)}"
