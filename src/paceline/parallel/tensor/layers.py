"""The linear layers that can be cut: nn.Linear, and Conv1D of transformers' GPT-2.

    nn.Linear     weight [outputs, inputs]
    Conv1D        weight [inputs, outputs]

This module does not import transformers: a model with a Conv1D has imported it.

If the outputs of one layer consist of several pieces, such as q, k and v, each worker needs its part of each piece:

    the layer's columns, 2 workers           q0 q1 k0 k1 v0 v1
    worker that has the column's weights      0  0  0  1  1  1        contiguous, as checkpoints and optimizers expect
    worker that needs the column's outputs    0  1  0  1  0  1        by heads, as attention expects

So each worker sends (n - 1) / n of its outputs to the others in one message. Gradients go the other way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from paceline.parallel.class_swap import apply_function

_CONV1D = ("transformers.pytorch_utils", "Conv1D")


def linear_kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of a linear layer, or None for another module."""
    conv: type[nn.Module] = getattr(sys.modules.get(_CONV1D[0]), _CONV1D[1], nn.Linear)
    return next((kind for kind in (nn.Linear, conv) if isinstance(module, kind)), None)


def is_turned(module: nn.Module) -> bool:
    """Return whether the weight is [inputs, outputs], the transpose of nn.Linear's."""
    return linear_kind(module) not in (None, nn.Linear)


def outputs(module: nn.Module) -> int:
    """Return the number of a linear layer's outputs per row."""
    return module.get_parameter("weight").shape[int(is_turned(module))]


def inputs(module: nn.Module) -> int:
    """Return the number of a linear layer's inputs per row."""
    return module.get_parameter("weight").shape[int(not is_turned(module))]


def cut_turned(module: nn.Module, mesh: DeviceMesh, placement: str, keeps: bool, takes: bool) -> None:
    """Cut a Conv1D in place, as torch cuts nn.Linear.

    Args:
        module: The layer.
        mesh: The mesh's axis.
        placement: "colwise" or "rowwise".
        keeps: Whether the layer returns only this rank's part of the outputs.
        takes: Whether the layer gets only this rank's part of the inputs.
    """
    is_column = placement == "colwise"
    cuts = {"weight": Shard(int(is_column)), "bias": Shard(0) if is_column else Replicate()}

    def partition(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
        for own, param in list(layer.named_parameters(recurse=False)):
            value = distribute_tensor(param, mesh, [cuts[own]], src_data_rank=None)
            layer.register_parameter(own, nn.Parameter(value, requires_grad=param.requires_grad))

    def take(layer: nn.Module, args: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        x, *rest = args
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Shard(-1) if takes else Replicate()], run_check=False)
        return (x if is_column else x.redistribute(placements=[Shard(-1)]), *rest)

    def give(layer: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[Shard(-1) if is_column and keeps else Replicate()]).to_local()

    # Declare the functions as Any: torch's type stubs require signatures that torch itself deprecates.
    inward: Any = take
    outward: Any = give
    distribute_module(module, mesh, partition, inward, outward)


def deal(module: nn.Module, pieces: int, group: dist.ProcessGroup | None) -> None:
    """Make a cut layer return this rank's part of each output piece (q, k, v)."""
    module.register_forward_hook(lambda layer, args, output: apply_function(_Deal, output, pieces, group))


def part_of(whole: Tensor, pieces: int, part: int, parts: int) -> Tensor:
    """Return part number `part` of `parts` of each piece, such as q, k and v."""
    if pieces == 1:
        size = whole.shape[-1] // parts
        return whole.narrow(-1, part * size, size)
    return whole.reshape(*whole.shape[:-1], pieces, parts, -1).select(-2, part).flatten(-2)


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, pieces: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.pieces, ctx.group = pieces, group
        return _exchanged(own, pieces, group, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], ctx.pieces, ctx.group, back=True), None, None


def _exchanged(own: Tensor, pieces: int, group: dist.ProcessGroup | None, *, back: bool) -> Tensor:
    """Send outputs between ranks so that each rank gets its part of each piece.

    A piece is, for example, q, k or v. With `back` gradients go the other way: from parts of each piece to contiguous columns.
    """
    parts, rank = dist.get_world_size(group), dist.get_rank(group)
    # The ranks' outputs are pieces * parts units of equal size. Unit j is on rank j // pieces, and must go to rank j % parts.
    by_columns = list(range(rank * pieces, (rank + 1) * pieces))
    by_pieces = list(range(rank, pieces * parts, parts))
    columns_of: Callable[[int], int] = lambda unit: unit // pieces  # noqa: E731
    piece_of: Callable[[int], int] = lambda unit: unit % parts  # noqa: E731
    held, wanted = (by_pieces, by_columns) if back else (by_columns, by_pieces)
    to, at = (columns_of, piece_of) if back else (piece_of, columns_of)
    units = own.reshape(*own.shape[:-1], pieces, -1).movedim(-2, 0)
    order = sorted(range(pieces), key=lambda index: (to(held[index]), held[index]))
    coming = sorted(range(pieces), key=lambda index: (at(wanted[index]), wanted[index]))
    sent = units[order].contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(
        received,
        sent,
        [sum(at(unit) == other for unit in wanted) for other in range(parts)],
        [sum(to(unit) == other for unit in held) for other in range(parts)],
        group=group,
    )
    places = torch.empty(pieces, dtype=torch.int64, device="cpu")
    places[torch.tensor(coming, device="cpu")] = torch.arange(pieces, device="cpu")
    return received[places.to(own.device)].movedim(0, -2).flatten(-2)
