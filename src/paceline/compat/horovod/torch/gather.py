"""All-gather, all-to-all and sparse all-reduce of tensors, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from paceline.collectives.numbers import Array
from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.ops import Average, Sum, check_splits, equal_splits
from paceline.compat.horovod.common.process_sets import ProcessSet, checked_members, global_process_set
from paceline.compat.horovod.common.reduction import checked_group
from paceline.compat.horovod.torch.allreduce import allreduce
from paceline.compat.horovod.torch.arrays import HostTensor, differentiable, from_array, host, results_like

Splits: TypeAlias = "torch.Tensor | Sequence[int] | None"


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order.

    The first dimension may differ between ranks and may be 0; other dimensions must be equal. As in Horovod, the
    gradient of this rank's part is the average over the ranks, not the sum.

    Raises:
        IndexError: The tensor has no dimension.
    """
    return differentiable(_Allgather, name, process_set, False, tensor)[0]  # type: ignore[no-any-return]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an `allgather` and return its handle."""
    return _submit([tensor], name, process_set, grouped=False)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return each tensor gathered as by `allgather`, in one operation.

    Raises:
        ValueError: The list is empty.
    """
    return list(differentiable(_Allgather, name, process_set, True, *checked_group(tensors)))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `grouped_allgather` and return its handle."""
    return _submit(checked_group(tensors), name, process_set, grouped=True)


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that every rank sent to this rank.

    `splits` (a list or int32 tensor) has the number of rows for each rank, from the first row on. Rows beyond the sum
    are not sent. None means equal parts. With `splits` the result is (tensor, received_splits), else one tensor.

    Raises:
        ValueError: The splits have another type or do not fit the tensor. Without splits: the rows do not divide equally.
    """
    received, received_splits = differentiable(_Alltoall, tensor, splits, name, process_set)
    return received if splits is None else (received, received_splits)


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an `alltoall` and return its handle."""
    return _submit_alltoall(tensor, splits, name, process_set, pair=splits is not None)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = handles.synchronize(_submit(tensors, name, process_set, grouped=grouped))
        # Keep only each tensor's number of rows: `backward` does not need the tensors, so their memory can be freed.
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(results) if grouped else (results,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[object, ...]:
        parts = [_own_part(grad, rows, ctx.process_set) for grad, rows in zip(grads, ctx.rows, strict=True)]
        return None, None, None, *parts


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        received, counts = handles.synchronize(_submit_alltoall(tensor, splits, name, process_set, pair=True))
        ctx.counts, ctx.rows, ctx.process_set = counts, tensor.shape[0], process_set
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[object, ...]:
        # Send each row back to the rank that it came from: the counts of received rows are now the counts of rows to send.
        returned = alltoall(grads[0], splits=ctx.counts, process_set=ctx.process_set)[0]
        if returned.shape[0] < ctx.rows:
            unsent = returned.new_zeros((ctx.rows - returned.shape[0], *returned.shape[1:]))
            returned = torch.cat([returned, unsent])
        return returned, None, None, None


def _submit(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, *, grouped: bool) -> int:
    arrays = [_rows(tensor).array for tensor in tensors]
    return handles.submit_several(
        "allgather", name, process_set, results_like(tensors, grouped), arrays, {}, grouped=grouped
    )


def _submit_alltoall(
    tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet, *, pair: bool
) -> int:
    size = len(checked_members(process_set))
    source = _rows(tensor)
    counts = _counts(splits, tensor.shape[0], size)

    def finish(result: tuple[Array, Sequence[int]]) -> object:
        received, received_splits = result
        made = from_array(received, tensor)
        return (made, torch.tensor([int(count) for count in received_splits], dtype=torch.int32)) if pair else made

    return handles.submit("alltoall", name, process_set, finish, source.array, {"splits": counts})


def _counts(splits: Splits, rows: int, size: int) -> list[int]:
    if splits is None:
        return equal_splits(rows, size)
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
    # Every rank has a gradient for the rows of all ranks, so average the whole gradient. This rank keeps its own rows below.
    averaged = allreduce(grad, op=Average, process_set=process_set)
    # The gathered tensor does not tell how many rows each rank had, so exchange the counts.
    counts = handles.synchronize(allgather_async(torch.tensor([rows]), None, process_set)).tolist()
    before = sum(counts[: process_set.rank()])
    return averaged[before : before + rows]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start a sum or average of sparse tensors.

    Return a function that waits and returns the result. This sparse tensor has the indices and values of all ranks.
    Call `coalesce()` to sum the values of equal indices.

    Raises:
        NotImplementedError: `op` is neither Average nor Sum.
        ValueError: The tensor is not sparse.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(
            "sparse tensors can be reduced with op=hvd.Average or op=hvd.Sum; convert others with to_dense()."
        )
    if not tensor.is_sparse:
        raise ValueError(f"sparse_allreduce_async takes a sparse COO tensor, not one of layout {tensor.layout}.")
    own = tensor.detach().coalesce()
    # Transpose the indices: allgather joins along the first dimension, in which the ranks may have different lengths.
    indices = allgather_async(own.indices().t(), None if name is None else f"{name}.indices", process_set)
    values = allgather_async(own.values(), None if name is None else f"{name}.values", process_set)

    def result() -> torch.Tensor:
        everywhere, summed = handles.synchronize(indices), handles.synchronize(values)
        if op == Average:
            rounding = None if summed.dtype.is_floating_point or summed.dtype.is_complex else "trunc"
            summed = torch.div(summed, len(checked_members(process_set)), rounding_mode=rounding)
        return torch.sparse_coo_tensor(everywhere.t(), summed, own.shape, check_invariants=False)

    return result
