"""allreduce: alone, in groups, in place, asynchronous, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.ops import Adasum, resolve_op
from paceline.compat.horovod.common.process_sets import (
    ProcessSet,
    check_adasum,
    checked_members,
    global_process_set,
)
from paceline.compat.horovod.common.reduction import How, checked_group
from paceline.compat.horovod.torch.arrays import (
    Filled,
    compressed,
    differentiable,
    filled,
    host,
    room,
    stays_on_device,
)
from paceline.compat.horovod.torch.compression import Compression


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A new tensor: this one, reduced over the ranks. Gradients flow through it, reduced the same way.

    op: hvd.Average unless told. Integers are scaled in float64 and cut toward 0, before the sum and after it.
    prescale_factor, postscale_factor: every rank's is multiplied before, the sum after.

    Raises:
        ValueError: the arguments contradict each other; not initialised; not a member of the process set.
        HorovodInternalError: ranks disagree on shape, type or operation, or one of them is gone; on every rank.
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
    """The handle of an `allreduce` into a new tensor. The given one must not change until it is synchronized."""
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
    """The tensor itself, reduced over the ranks in place."""
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    # The engine's thread is not woken: `synchronize`, which has to follow, does the work in this thread, and only then do
    # the other ranks hear of it.
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
    """The handle of an `allreduce_`."""
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return submit_allreduce([tensor], name, how, in_place=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """New tensors, reduced together: none begins before all of them are there on every rank. Types may differ.

    Raises:
        ValueError: as `allreduce`; or the list is empty.
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
    """The handle of a `grouped_allreduce`."""
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
    """The tensors themselves, reduced together in place."""
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
    """The handle of a `grouped_allreduce_`."""
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return submit_allreduce(checked_group(tensors), name, how, grouped=True, in_place=True)


class _Allreduce(torch.autograd.Function):
    """Of one tensor, or of a group."""

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
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Without the name: the backward pass goes by numbers, so it does not meet a forward pass of this name that is in
        # flight.
        return None, None, None, *differentiable(_Allreduce, None, ctx.how, ctx.grouped, *grads)


def submit_allreduce(
    tensors: Sequence[torch.Tensor], name: str | None, how: How, *, grouped: bool = False, in_place: bool = False
) -> int:
    """The handle of the reduction of the tensors, of which there is one unless they are `grouped`; into new ones if not
    `in_place`.
    """
    # Adasum is computed in the host's memory, wherever the tensors lie.
    if how.op == Adasum:
        check_adasum(how.process_set)
    elif stays_on_device(tensors) and len(checked_members(how.process_set)) > 1:
        return _submit_on_device(tensors, name, how, grouped=grouped, in_place=in_place)
    if not grouped:
        source = host(tensors[0])
        out = source if in_place else room(source)
        told = {"out": out.array, "dtype": source.dtype, **how.engine()}
        return handles.submit("allreduce", name, how.process_set, Filled(tensors[0], in_place, out), source.array, told)
    sources = [host(tensor) for tensor in tensors]
    outs = sources if in_place else [room(source) for source in sources]

    def finish(_: Any) -> list[torch.Tensor]:
        return [filled(tensor, in_place, out) for tensor, out in zip(tensors, outs, strict=True)]

    arrays, dtypes = [source.array for source in sources], [source.dtype for source in sources]
    told = {"outs": [out.array for out in outs], "dtype": dtypes, **how.engine()}
    return handles.submit("grouped_allreduce", name, how.process_set, finish, arrays, told)


def _submit_on_device(
    tensors: Sequence[torch.Tensor], name: str | None, how: How, *, grouped: bool, in_place: bool
) -> int:
    given = [tensor.detach() for tensor in tensors]
    results = list(tensors)
    if not in_place:
        results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given]

    def finish(let_wait: Callable[[], None]) -> Any:
        # Lets torch's stream wait for NCCL, not this thread.
        let_wait()
        return results if grouped else results[0]

    kind = "grouped_allreduce" if grouped else "allreduce"
    told = {"outs": [result.detach() for result in results], **how.engine()}
    return handles.submit(kind, name, how.process_set, finish, given, told, "device_allreduce")
