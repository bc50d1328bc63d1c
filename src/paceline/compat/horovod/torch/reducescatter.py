"""Reduce-scatter of tensors, single and grouped, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.exceptions import HorovodInternalError
from paceline.compat.horovod.common.ops import Average, Sum
from paceline.compat.horovod.common.process_sets import ProcessSet, checked_members, global_process_set
from paceline.compat.horovod.common.reduction import Compressor, How, checked_group
from paceline.compat.horovod.torch.arrays import compressed, host, results_like
from paceline.compat.horovod.torch.compression import Compression
from paceline.compat.horovod.torch.gather import allgather


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's share of the reduced tensor's rows.

    If the rows do not divide evenly, each of the first ranks gets one row more. The gradient is the concatenation of
    the ranks' gradients. As in Horovod, Sum multiplies this gradient by the number of ranks.

    Raises:
        HorovodInternalError: `op` is neither Average nor Sum, the tensor has no dimension, or the ranks disagree.
    """
    how = How(op, prescale_factor, postscale_factor, process_set)
    return compressed(_Reducescatter, [tensor], compression, name, how, grouped=False)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter` and return its handle."""
    how = How(op, prescale_factor, postscale_factor, process_set)
    return _submit([tensor], name, how, grouped=False)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter each tensor like `reducescatter`, as one operation.

    Raises:
        ValueError: The list is empty.
    """
    how = How(op, prescale_factor, postscale_factor, process_set)
    return compressed(_Reducescatter, checked_group(tensors), compression, name, how, grouped=True)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter` and return its handle."""
    how = How(op, prescale_factor, postscale_factor, process_set)
    return _submit(checked_group(tensors), name, how, grouped=True)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, how: How, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        results = handles.synchronize(_submit(tensors, name, how, grouped=grouped))
        return tuple(results) if grouped else (results,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[object, ...]:
        op, pre, post, process_set = ctx.how
        scale = pre * post * (len(checked_members(process_set)) if op == Sum else 1)
        # Scale into a new tensor: the tensor in `grads` belongs to autograd, and other code may be reading it.
        gathered = [allgather(grad if scale == 1 else grad * scale, process_set=process_set) for grad in grads]
        return None, None, None, *gathered


def _submit(tensors: Sequence[torch.Tensor], name: str | None, how: How, *, grouped: bool) -> int:
    if how.op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise HorovodInternalError("Reducescatter of a rank-zero tensor: it has no rows; use tensor.reshape(1).")
    sources = [host(tensor) for tensor in tensors]
    arrays, finish = [source.array for source in sources], results_like(tensors, grouped)
    options = {"dtype": [source.dtype for source in sources], **how.engine()}
    return handles.submit_several("reducescatter", name, how.process_set, finish, arrays, options, grouped=grouped)
