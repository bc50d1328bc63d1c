"""Numbers that stand in for parameters without values while a model is looked at, and take no memory. Imports torch.

A weight of n x m numbers is a view of n + m - 1 random ones, each row moved on by one: of full rank, as trained weights are, so
that two ways of computing differ where they would differ. Kernels copy such a view, so what is timed takes dense ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from paceline.parallel import ties
from paceline.parallel.randomness import normal


@contextlib.contextmanager
def stand_ins(
    model: nn.Module, device: torch.device, *, names: Collection[str] | None = None, dense: bool = False
) -> Iterator[None]:
    """Parameters without memory have numbers until the block ends, the same on all ranks.

    names: only those. dense: in memory of their own.
    """
    first = ties.first_names(model)
    made: dict[int, nn.Parameter] = {}
    swapped = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if not param.is_meta or (names is not None and name not in names):
            continue
        if id(param) not in made:
            value = stand_in(first[name], param, device)
            made[id(param)] = nn.Parameter(
                value.clone(memory_format=torch.contiguous_format) if dense else value, param.requires_grad
            )
        swapped.append((*ties.owner_of(model, name), param))
    try:
        for module, last, param in swapped:
            # By setattr: RNNs keep a second list of their parameters.
            setattr(module, last, made[id(param)])
        yield
    finally:
        for module, last, param in swapped:
            setattr(module, last, param)


def stand_in(name: str, param: Tensor, device: torch.device) -> Tensor:
    """Numbers of the size that weights of this shape have."""
    count = sum(param.shape) - param.dim() + 1
    if not param.is_floating_point() or not param.numel():
        return torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
    drawn = normal((count,), f"stand in {name}") * math.prod(param.shape[1:]) ** -0.5
    found: Tensor = drawn.to(device, param.dtype).as_strided(tuple(param.shape), (1,) * param.dim())
    return found
