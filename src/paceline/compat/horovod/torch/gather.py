"""allgather and alltoall, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.arguments import checked_group
from paceline.compat.horovod.common.ops import Average, check_splits
from paceline.compat.horovod.common.process_sets import (
    ProcessSet,
    checked_members,
    global_process_set,
    registered_number,
)
from paceline.compat.horovod.torch.allreduce import allreduce
from paceline.compat.horovod.torch.arrays import HostTensor, differentiable, from_array, host


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The ranks' tensors one after the other along their first dimension, in the order of the ranks.

    tensor: its first dimension may differ between ranks, and may be 0; the others must be the same everywhere.
    The gradient is the average of the ranks' gradients of this rank's part (as Horovod has it), not their sum.

    Raises:
        IndexError: the tensor has no dimension.
    """
    return differentiable(_Allgather, tensor, name, process_set)  # type: ignore[no-any-return]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """The handle of an `allgather`."""
    source = _rows(tensor)

    def finish(result: Any) -> torch.Tensor:
        return from_array(result, tensor)

    return handles.submit(
        "allgather",
        name,
        process_set,
        lambda engine, full: engine.allgather(full, source.array, process_set=registered_number(process_set)),
        finish,
    )


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """`allgather` of each, begun when all of them are there on every rank.

    Raises:
        ValueError: the list is empty.
    """
    return list(differentiable(_GroupedAllgather, name, process_set, *checked_group(tensors)))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The handle of a `grouped_allgather`."""
    given = checked_group(tensors)
    sources = [_rows(tensor) for tensor in given]

    def finish(results: Any) -> list[torch.Tensor]:
        return [from_array(result, tensor) for result, tensor in zip(results, given, strict=True)]

    return handles.submit(
        "grouped_allgather",
        name,
        process_set,
        lambda engine, full: engine.grouped_allgather(
            full, [source.array for source in sources], process_set=registered_number(process_set)
        ),
        finish,
    )


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows that every rank has sent to this one, in the order of the ranks; with `splits` also how many came from each.

    splits: rows to send to each rank, from the first row on; a list, or an int32 tensor. What is left over is not
        sent. None: equal parts.
    The result is one tensor if `splits` is None, else (tensor, received_splits).

    Raises:
        ValueError: splits that don't fit, of another type; or without splits, rows that can't be divided equally.
    """
    received, received_splits = differentiable(_Alltoall, tensor, splits, name, process_set)
    return received if splits is None else (received, received_splits)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The handle of an `alltoall`."""
    return _submit_alltoall(tensor, splits, name, process_set, pair=splits is not None)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        result: torch.Tensor = handles.synchronize(allgather_async(tensor, name, process_set))
        # The number of rows only: the tensor itself is not needed for the gradient, and need not be kept for it.
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _own_part(grads[0], ctx.rows, ctx.process_set), None, None


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        result = handles.synchronize(grouped_allgather_async(tensors, name, process_set))
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [_own_part(grad, rows, ctx.process_set) for grad, rows in zip(grads, ctx.rows, strict=True)]
        return None, None, *parts


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        received, counts = handles.synchronize(_submit_alltoall(tensor, splits, name, process_set, pair=True))
        ctx.counts, ctx.rows, ctx.process_set = counts, tensor.shape[0], process_set
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Each rank gives back as many rows as it was given by each: what came is what is returned.
        returned = alltoall(grads[0], splits=ctx.counts, process_set=ctx.process_set)[0]
        if returned.shape[0] < ctx.rows:
            # Rows that were not sent have had no influence.
            unsent = returned.new_zeros((ctx.rows - returned.shape[0], *returned.shape[1:]))
            returned = torch.cat([returned, unsent])
        return returned, None, None, None


def _submit_alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, *, pair: bool
) -> int:
    size = len(checked_members(process_set))
    source = _rows(tensor)
    counts = _counts(splits, tensor.shape[0], size)

    def finish(result: Any) -> Any:
        received, received_splits = result
        made = from_array(received, tensor)
        return (made, torch.tensor([int(count) for count in received_splits], dtype=torch.int32)) if pair else made

    return handles.submit(
        "alltoall",
        name,
        process_set,
        lambda engine, full: engine.alltoall(
            full, source.array, splits=counts, process_set=registered_number(process_set)
        ),
        finish,
    )


def _counts(splits: Any, rows: int, size: int) -> list[int]:
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall without splits needs a first dimension that {size} ranks can share equally; it is {rows}. "
                "Give splits."
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError(
                f"splits must be a one-dimensional tensor of torch.int32, not {splits.dtype} with {splits.dim()} "
                "dimensions; or a list."
            )
        splits = splits.tolist()
    counts = [int(count) for count in splits]
    check_splits(counts, rows, size)
    return counts


def _rows(tensor: torch.Tensor) -> HostTensor:
    source = host(tensor)
    if tensor.dim() == 0:
        raise IndexError("a tensor without dimensions has no rows to gather; use tensor.reshape(1).")
    return source


def _own_part(grad: torch.Tensor, rows: int, process_set: ProcessSet) -> torch.Tensor:
    # All of it is averaged though only some rows are this rank's: each of the others takes part for its own.
    averaged = allreduce(grad, op=Average, process_set=process_set)
    # How many rows each rank had, the gathered tensor does not tell.
    counts = handles.synchronize(allgather_async(torch.tensor([rows]), None, process_set)).tolist()
    before = sum(counts[: process_set.rank()])
    return averaged[before : before + rows]
