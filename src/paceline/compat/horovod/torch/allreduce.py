"""All-reduce of tensors: single, grouped, in place, asynchronous, with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.ops import Adasum, resolve_op
from paceline.compat.horovod.common.process_sets import ProcessSet, check_adasum, checked_members, global_process_set
from paceline.compat.horovod.common.reduction import Compressor, How, checked_group
from paceline.compat.horovod.torch.arrays import Filled, compressed, differentiable, filled, host, room, stays_on_device
from paceline.compat.horovod.torch.compression import Compression


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the tensor over the ranks into a new tensor.

    Gradients flow through the operation, and are reduced in the same way. `op` is hvd.Average by default.
    `prescale_factor` multiplies every rank's tensor before the sum, `postscale_factor` the sum. Integers are scaled in
    float64 and truncated towards 0, before and after the sum.

    Raises:
        ValueError: The arguments contradict each other, Horovod is not initialized, or this rank is not in the process set.
        HorovodInternalError: The ranks disagree on shape, type or operation, or a rank has died. Every rank raises this error.
    """
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return compressed(_Allreduce, [tensor], compression, name, how, grouped=False)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce` and return its handle. Do not change the input before `synchronize`."""
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return submit_allreduce([tensor], name, how)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the tensor over the ranks in place, and return it."""
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    # Don't wake the engine's thread, because `synchronize` below does the engine's work in this thread. The other ranks learn of
    # the operation only during `synchronize`.
    with handles.waiting_at_once:
        done = submit_allreduce([tensor], name, how, in_place=True)
    return handles.synchronize(done)  # type: ignore[no-any-return]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce_` and return its handle."""
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return submit_allreduce([tensor], name, how, in_place=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce tensors as one operation, once all are ready on all ranks.

    The tensors' types may differ.

    Raises:
        ValueError: `allreduce` would raise it, or the list is empty.
    """
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return compressed(_Allreduce, checked_group(tensors), compression, name, how, grouped=True)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce` and return its handle."""
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return submit_allreduce(checked_group(tensors), name, how, grouped=True)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce the tensors together in place, and return them."""
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    done = submit_allreduce(checked_group(tensors), name, how, grouped=True, in_place=True)
    return handles.synchronize(done)  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce_` and return its handle."""
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return submit_allreduce(checked_group(tensors), name, how, grouped=True, in_place=True)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, how: How, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how, ctx.grouped = how, grouped
        if grouped:
            return tuple(handles.synchronize(submit_allreduce(tensors, name, how, grouped=True)))
        with handles.waiting_at_once:
            done = submit_allreduce(tensors, name, how)
        return (handles.synchronize(done),)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[object, ...]:
        # Send no name: another forward pass of this name may be in flight, and its operation would match. The ranks match
        # operations without names by their order.
        return None, None, None, *differentiable(_Allreduce, None, ctx.how, ctx.grouped, *grads)


def submit_allreduce(
    tensors: Sequence[torch.Tensor], name: str | None, how: How, *, grouped: bool = False, in_place: bool = False
) -> int:
    """Submit an all-reduce and return its handle."""
    # Use host memory for Adasum, even for tensors on a GPU.
    if how.op == Adasum:
        check_adasum(how.process_set)
    elif stays_on_device(tensors) and len(checked_members(how.process_set)) > 1:
        return _submit_on_device(tensors, name, how, grouped=grouped, in_place=in_place)
    if not grouped:
        source = host(tensors[0])
        out = source if in_place else room(source)
        options = {"out": out.array, "dtype": source.dtype, **how.engine()}
        return handles.submit(
            "allreduce", name, how.process_set, Filled(tensors[0], in_place, out), source.array, options
        )
    sources = [host(tensor) for tensor in tensors]
    outs = sources if in_place else [room(source) for source in sources]

    def finish(_: object) -> list[torch.Tensor]:
        return [filled(tensor, in_place, out) for tensor, out in zip(tensors, outs, strict=True)]

    arrays, dtypes = [source.array for source in sources], [source.dtype for source in sources]
    options = {"outs": [out.array for out in outs], "dtype": dtypes, **how.engine()}
    return handles.submit("grouped_allreduce", name, how.process_set, finish, arrays, options)


def _submit_on_device(
    tensors: Sequence[torch.Tensor], name: str | None, how: How, *, grouped: bool, in_place: bool
) -> int:
    sources = [tensor.detach() for tensor in tensors]
    results = list(tensors)
    if not in_place:
        results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in sources]

    def finish(let_wait: Callable[[], None]) -> object:
        # Make only torch's CUDA stream wait for NCCL. This thread continues without waiting.
        let_wait()
        return results if grouped else results[0]

    kind = "grouped_allreduce" if grouped else "allreduce"
    options = {"outs": [result.detach() for result in results], **how.engine()}
    return handles.submit(kind, name, how.process_set, finish, sources, options, "device_allreduce")
