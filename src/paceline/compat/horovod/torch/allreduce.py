"""allreduce: alone, in groups, in place, asynchronous, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.arguments import checked_group, engine_arguments
from paceline.compat.horovod.common.ops import Adasum, resolve_op
from paceline.compat.horovod.common.process_sets import (
    ProcessSet,
    check_adasum,
    checked_members,
    global_process_set,
)
from paceline.compat.horovod.torch.arrays import (
    HostTensor,
    differentiable,
    empty_like,
    host,
    stays_on_device,
    write_back,
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
    asked = resolve_op(op, average)
    compressed, ctx = compression.compress(tensor)
    reduced = differentiable(_Allreduce, compressed, name, asked, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, ctx)  # type: ignore[no-any-return]


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
    asked = resolve_op(op, average)
    return _submit([tensor], [None], name, asked, prescale_factor, postscale_factor, process_set, first=True)


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
    asked = resolve_op(op, average)
    # The engine's thread is not woken: `synchronize`, which has to follow, does the work in this thread, and only then do
    # the other ranks hear of it.
    with handles.waiting_at_once():
        done = _submit([tensor], [tensor], name, asked, prescale_factor, postscale_factor, process_set, first=True)
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
    asked = resolve_op(op, average)
    return _submit([tensor], [tensor], name, asked, prescale_factor, postscale_factor, process_set, first=True)


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
    asked = resolve_op(op, average)
    compressed = [compression.compress(tensor) for tensor in checked_group(tensors)]
    sent = [tensor for tensor, _ in compressed]
    reduced = differentiable(
        _GroupedAllreduce,
        name,
        asked,
        prescale_factor,
        postscale_factor,
        process_set,
        *sent,
    )
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, compressed, strict=True)]


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
    asked = resolve_op(op, average)
    given = checked_group(tensors)
    return _submit(given, [None] * len(given), name, asked, prescale_factor, postscale_factor, process_set)


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
    asked = resolve_op(op, average)
    given = checked_group(tensors)
    done = _submit(given, given, name, asked, prescale_factor, postscale_factor, process_set)
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
    asked = resolve_op(op, average)
    given = checked_group(tensors)
    return _submit(given, given, name, asked, prescale_factor, postscale_factor, process_set)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        # All but the name. The backward pass goes by numbers, so it does not meet a forward pass of this name that is in
        # flight.
        ctx.how = how[1:]
        with handles.waiting_at_once():
            done = _submit([tensor], [None], *how, first=True)
        return handles.synchronize(done)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, pre, post, process_set = ctx.how
        grad = allreduce(grads[0], op=op, prescale_factor=pre, postscale_factor=post, process_set=process_set)
        # One None for each of the arguments after the tensor.
        return grad, *[None] * 5


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        how, tensors = given[:5], list(given[5:])
        ctx.how = how[1:]
        return tuple(handles.synchronize(_submit(tensors, [None] * len(tensors), *how)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, pre, post, process_set = ctx.how
        reduced = grouped_allreduce(
            list(grads), op=op, prescale_factor=pre, postscale_factor=post, process_set=process_set
        )
        return *[None] * 5, *reduced


def _submit(
    tensors: list[torch.Tensor],
    targets: Sequence[torch.Tensor | None],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    first: bool = False,
) -> int:
    """The handle of the reduction of `tensors` into `targets` (None: a new tensor). first: not a group, but one."""
    # Adasum is computed in the host's memory, wherever the tensors lie.
    if op == Adasum:
        check_adasum(process_set)
    elif stays_on_device(tensors) and len(checked_members(process_set)) > 1:
        return _submit_on_device(tensors, targets, name, op, prescale, postscale, process_set, first=first)
    how = engine_arguments(op, prescale, postscale, process_set)
    if first:
        source, target = host(tensors[0]), targets[0]
        # In place the engine writes to what it reads. Where `host` had to make a copy, `_result` brings the values back.
        out = source if target is not None else empty_like(source.tensor)

        def start_one(engine: Any, full: str) -> Any:
            return engine.allreduce(full, source.array, out=out.array, dtype=source.dtype, **how)

        return handles.submit("allreduce", name, process_set, start_one, _Finish(tensors[0], target, out))
    sources = [host(tensor) for tensor in tensors]
    outs = [
        source if target is not None else empty_like(source.tensor)
        for source, target in zip(sources, targets, strict=True)
    ]

    def start(engine: Any, full: str) -> Any:
        return engine.grouped_allreduce(
            full,
            [source.array for source in sources],
            outs=[out.array for out in outs],
            dtype=[source.dtype for source in sources],
            **how,
        )

    def finish(_: Any) -> Any:
        return [_result(*item) for item in zip(tensors, targets, outs, strict=True)]

    return handles.submit("grouped_allreduce", name, process_set, start, finish)


@dataclass(slots=True)
class _Finish:
    """Makes the script's result of the engine's. An object, not a function with what it refers to, which is many: hundreds
    are in flight in a step, and Python's garbage collector is called by their number."""

    tensor: torch.Tensor
    target: torch.Tensor | None
    out: HostTensor

    def __call__(self, _: Any) -> torch.Tensor:
        return _result(self.tensor, self.target, self.out)


def _submit_on_device(
    tensors: list[torch.Tensor],
    targets: Sequence[torch.Tensor | None],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    first: bool,
) -> int:
    given = [tensor.detach() for tensor in tensors]
    results = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if target is None else target
        for tensor, target in zip(given, targets, strict=True)
    ]

    def start(engine: Any, full: str) -> Any:
        return engine.device_allreduce(
            full,
            given,
            [result.detach() for result in results],
            **engine_arguments(op, prescale, postscale, process_set),
        )

    def finish(let_wait: Callable[[], None]) -> Any:
        # Lets torch's stream wait for NCCL, not this thread.
        let_wait()
        return results[0] if first else results

    return handles.submit("allreduce" if first else "grouped_allreduce", name, process_set, start, finish)


def _result(tensor: torch.Tensor, target: torch.Tensor | None, out: HostTensor) -> torch.Tensor:
    return out.tensor.to(tensor.device) if target is None else write_back(target, out.tensor)
