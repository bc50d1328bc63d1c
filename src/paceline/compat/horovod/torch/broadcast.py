"""Broadcast of tensors, with its gradient."""

from __future__ import annotations

from typing import Any

import torch

from paceline.compat.horovod.common import basics, handles
from paceline.compat.horovod.common.ops import Average
from paceline.compat.horovod.common.process_sets import ProcessSet, check_root, global_process_set
from paceline.compat.horovod.torch.allreduce import allreduce
from paceline.compat.horovod.torch.arrays import Filled, differentiable, host, room


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return a new tensor with the values of `root_rank`.

    `root_rank` is a world rank even within a process set. As in Horovod, the gradient on the root is the average over
    the ranks, and the gradient on other ranks is 0.

    Raises:
        ValueError: `root_rank` is not in the process set.
        HorovodInternalError: Shapes, types or roots differ between ranks. Every rank raises this error.
    """
    return differentiable(_Broadcast, tensor, root_rank, name, process_set)  # type: ignore[no-any-return]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `broadcast` and return its handle."""
    return _submit(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace the tensor's values by `root_rank`'s values, and return the tensor."""
    return handles.synchronize(_submit(tensor, root_rank, name, process_set, in_place=True))  # type: ignore[no-any-return]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `broadcast_` and return its handle."""
    return _submit(tensor, root_rank, name, process_set, in_place=True)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.root, ctx.process_set = root, process_set
        return handles.synchronize(_submit(tensor, root, name, process_set))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[object, ...]:
        # The all-reduce is a collective, so every rank takes part, although only the root keeps the result.
        averaged = allreduce(grads[0], op=Average, process_set=ctx.process_set)
        return (averaged if basics.rank() == ctx.root else torch.zeros_like(averaged)), None, None, None


def _submit(
    tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet, *, in_place: bool = False
) -> int:
    check_root(root, process_set)
    source = host(tensor)
    out = source if in_place else room(source)
    done = Filled(tensor, in_place, out)
    return handles.submit("broadcast", name, process_set, done, source.array, {"root": root, "out": out.array})
