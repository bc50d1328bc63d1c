"""The whole model on every rank, put together from stages and parts. Loaded on use: it imports torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.checkpoint.state import HeldState
from paceline.parallel.exchange import gather
from paceline.parallel.full_tensor import whole
from paceline.parallel.mesh import World


def full_state_dict(held: HeldState, world: World) -> dict[str, Tensor]:
    """Every name -> the whole tensor, on the CPU, detached; tied names share one tensor. Called on all ranks."""
    own = {name: _whole(tensor.detach()) for name, tensor in held.model_tensors().items()}
    names = held.first_names()
    group = world.group(world.holder_axis)
    if group is not None:
        names = {name: first for of_stage in gather(names, group) for name, first in of_stage.items()}
        own = _from_stages(own, group, world.device)
    return {name: own[first] for name, first in names.items()}


def _whole(tensor: Tensor) -> Tensor:
    # A tensor that is whole already is copied too, or the next step would change what the caller holds.
    return whole(tensor).to("cpu", copy=True)  # type: ignore[no-any-return]


def _from_stages(own: dict[str, Tensor], group: Any, device: torch.device) -> dict[str, Tensor]:
    """The tensors of all stages; of copies of one tensor, that of the first stage."""
    about = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
    found: dict[str, Tensor] = {}
    for stage, names in enumerate(gather(about, group)):
        root = dist.get_global_rank(group, stage)
        for name, (shape, dtype) in names.items():
            if name in found:
                continue
            is_owner = dist.get_rank() == root
            tensor = own[name].to(device) if is_owner else torch.empty(shape, dtype=dtype, device=device)
            if tensor.numel():
                dist.broadcast(tensor, root, group=group)
            found[name] = tensor.cpu()
    return found
