"""reducescatter, alone and in groups, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.arguments import checked_group, engine_arguments
from paceline.compat.horovod.common.exceptions import HorovodInternalError
from paceline.compat.horovod.common.ops import Average, Sum
from paceline.compat.horovod.common.process_sets import ProcessSet, checked_members, global_process_set
from paceline.compat.horovod.torch.arrays import differentiable, from_array, host
from paceline.compat.horovod.torch.compression import Compression
from paceline.compat.horovod.torch.gather import allgather


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduced tensor. What can't be shared equally goes to the first ranks, one row each.

    The gradient is the ranks' gradients one after the other, times the number of ranks for Sum (as Horovod has it).

    Raises:
        HorovodInternalError: `op` is neither Average nor Sum; the tensor has no dimension; or the ranks disagree.
    """
    compressed, ctx = compression.compress(tensor)
    reduced = differentiable(_Reducescatter, name, op, process_set, prescale_factor, postscale_factor, compressed)
    return compression.decompress(reduced[0], ctx)  # type: ignore[no-any-return]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """The handle of a `reducescatter`."""
    return _submit([tensor], name, op, process_set, prescale_factor, postscale_factor, first=True)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of each, begun when all of them are there on every rank.

    Raises:
        ValueError: the list is empty.
    """
    compressed = [compression.compress(tensor) for tensor in checked_group(tensors)]
    sent = [tensor for tensor, _ in compressed]
    reduced = differentiable(_Reducescatter, name, op, process_set, prescale_factor, postscale_factor, *sent)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """The handle of a `grouped_reducescatter`."""
    return _submit(checked_group(tensors), name, op, process_set, prescale_factor, postscale_factor)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        how, tensors = given[:5], list(given[5:])
        ctx.how = how[1:]
        first = len(tensors) == 1
        results = handles.synchronize(_submit(tensors, *how, first=first))
        return (results,) if first else tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, process_set, pre, post = ctx.how
        scale = pre * post * (len(checked_members(process_set)) if op == Sum else 1)
        # A new tensor: the one that was given belongs to autograd, and others may be reading it.
        gathered = [allgather(grad if scale == 1 else grad * scale, process_set=process_set) for grad in grads]
        return *[None] * 5, *gathered


def _submit(
    tensors: list[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    *,
    first: bool = False,
) -> int:
    if op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise HorovodInternalError(
            "Reducescatter of a rank-zero tensor: it has no rows to share; use tensor.reshape(1)."
        )
    sources = [host(tensor) for tensor in tensors]
    how = engine_arguments(op, prescale, postscale, process_set)

    def start(engine: Any, full: str) -> Any:
        if first:
            return engine.reducescatter(full, sources[0].array, dtype=sources[0].dtype, **how)
        arrays, dtypes = [source.array for source in sources], [source.dtype for source in sources]
        return engine.grouped_reducescatter(full, arrays, dtype=dtypes, **how)

    def finish(results: Any) -> Any:
        arrays = [results] if first else results
        made = [from_array(array, tensor) for array, tensor in zip(arrays, tensors, strict=True)]
        return made[0] if first else made

    return handles.submit("reducescatter" if first else "grouped_reducescatter", name, process_set, start, finish)
