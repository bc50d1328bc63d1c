"""Outputs of one layer that consist of several pieces, such as q, k and v: each worker takes its part of each. Imports torch.

    the layer's columns, 2 workers     q0 q1 k0 k1 v0 v1        u = a worker's part of a piece
    as the weight is cut                0  0  0  1  1  1        in one go, as checkpoints and optimizers know it
    as attention has to have them       0  1  0  1  0  1        by heads

So a layer's outputs are dealt anew, by one message of (n - 1) / n of a worker's own outputs; gradients go the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def deal(module: nn.Module, pieces: int, group: Any) -> None:
    """From now on the layer, cut by columns in one go, gives this rank's part of each piece."""
    apply: Any = _Deal.apply
    module.register_forward_hook(lambda layer, args, output: apply(output, pieces, group))


def part_of(whole: Tensor, pieces: int, part: int, parts: int) -> Tensor:
    """What part number `part` of a layer's outputs [..., outputs] is: its part of each piece."""
    if pieces == 1:
        size = whole.shape[-1] // parts
        return whole.narrow(-1, part * size, size)
    return whole.reshape(*whole.shape[:-1], pieces, parts, -1).select(-2, part).flatten(-2)


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, pieces: int, group: Any) -> Tensor:
        ctx.pieces, ctx.group = pieces, group
        return _exchanged(own, pieces, group, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchanged(grads[0], ctx.pieces, ctx.group, back=True), None, None


def _exchanged(own: Tensor, pieces: int, group: Any, *, back: bool) -> Tensor:
    """own: [..., pieces * u]. back: from each piece's part to what the weight's columns give."""
    parts, rank = dist.get_world_size(group), dist.get_rank(group)
    # Unit j of all outputs, of u numbers each, lies with rank j // pieces, and belongs to rank j % parts.
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
