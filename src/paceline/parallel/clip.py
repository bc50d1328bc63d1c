"""The norm of all gradients together, over shards and stages, and clipping by it. Loaded on use: it imports torch.

torch's `clip_grad_norm_` knows one mesh at a time and nothing of pipelines: clipping each stage by its own norm changes
the direction of the step, and a tensor that two stages hold would count twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.exchange import gather
from paceline.parallel.full_tensor import axes_of
from paceline.parallel.mesh import World
from paceline.parallel.reduce import local


class Clipper:
    """Clips the gradients of one model on one layout. Made on all ranks.

    params: as `Executor.named_parameters` gives them.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], world: World) -> None:
        self._params = dict(params)
        self._world = world
        self._owned = _owned(self._params, world)

    def norm(self) -> Tensor:
        """The 2-norm of the gradients of the whole model, 0-dim, the same on every rank. Called on all ranks."""
        group = self._world.model_group
        if group is None:
            return torch.nn.utils.get_total_norm([p.grad for p in self._params.values() if p.grad is not None])
        # Squares are summed in float64: in float32 the norm would depend on how the parameters are spread over the ranks.
        squares = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for name, param in self._params.items():
            if param.grad is not None and name in self._owned and _counts_here(param.grad, self._world):
                squares += torch.linalg.vector_norm(local(param.grad), dtype=_wide(param.grad)).double().square()
        dist.all_reduce(squares, group=group)
        return squares.sqrt()

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; the norm that they had. Called on all ranks."""
        if self._world.model_group is None:
            # torch's own function, as in a plain loop: the same sums to the last bit.
            return torch.nn.utils.clip_grad_norm_(self._params.values(), max_norm)
        norm = self.norm()
        # The same small number as in torch's `clip_grad_norm_`.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for param in self._params.values():
            if param.grad is not None:
                part = local(param.grad)
                part.mul_(factor.to(part.dtype))
        return norm


def _owned(params: Mapping[str, nn.Parameter], world: World) -> set[str]:
    """The names that this rank's stage counts: a tied tensor counts in the first stage that holds it."""
    group = world.group(world.holder_axis)
    if group is None:
        return set(params)
    # Of a parameter that is in parts over these ranks each counts its own.
    whole = [name for name, param in params.items() if world.holder_axis not in axes_of(param)]
    held = gather(whole, group)
    # All stages make the same list, so a copy of a tied parameter counts in exactly one of them.
    earlier = {name for names in held[: world.coordinate(world.holder_axis)] for name in names}
    return set(params) - earlier


def _counts_here(grad: Tensor, world: World) -> bool:
    """True if this rank adds its part: every shard does; of equal copies along an axis only the first one."""
    split = axes_of(grad)
    return all(world.coordinate(axis) == 0 for axis in ("shard", "tensor") if axis not in split)


def _wide(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)
