"""Which places of a sequence each worker has, and the whole put together from them. Loaded on use: it imports torch.

    2 workers, 8 places     0 1 2 3 4 5 6 7
    worker                  0 0 1 1 1 1 0 0     a piece from the front and one from the back

In causal attention the last places have most to do; so each worker has as much as the others, as in torch's own ring attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.errors import ParallelError


class Places:
    """The places of sequences of one length.

    length: of the whole. own: how many of them this rank has.
    """

    def __init__(self, length: int, group: Any, device: torch.device) -> None:
        """group: the ranks among which each sequence is cut.

        Raises:
            ParallelError: there are fewer places than pieces.
        """
        self.length, self.group = length, group
        self._ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if length < 2 * self._ranks:
            raise ParallelError(
                f"ContextParallel({self._ranks}): a sequence of {length} places can't be cut into two pieces for each worker. "
                f"Give sequences of {2 * self._ranks} or more, or name the dimension of the sequence: ContextParallel(dim=...)."
            )
        pieces = torch.arange(length, device=device).tensor_split(2 * self._ranks)
        self._of_rank = [torch.cat([pieces[one], pieces[-1 - one]]) for one in range(self._ranks)]
        self._mine = self._of_rank[rank]
        self.own = len(self._mine)
        #: This rank's two pieces, as from and to in the whole.
        self.pieces = [(int(piece[0]), int(piece[-1]) + 1) for piece in (pieces[rank], pieces[-1 - rank])]
        # Messages are of one size: the shorter ones are filled up.
        self._most = max(map(len, self._of_rank))
        slots = torch.empty(length, dtype=torch.int64, device=device)
        for one, places in enumerate(self._of_rank):
            slots[places] = one * self._most + torch.arange(len(places), device=device)
        self._slots = slots

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's places; the gradient of the others is 0 here."""
        return whole.index_select(dim, self._mine)

    def together(self, part: Tensor, dim: int) -> Tensor:
        """The whole from all ranks' parts; the gradients of all ranks for this rank's part are summed."""
        apply: Any = _Together.apply
        whole: Tensor = apply(part, self, dim)
        return whole

    def gather(self, part: Tensor, dim: int) -> Tensor:
        first = part.movedim(dim, 0)
        filled = first.new_zeros((self._most, *first.shape[1:]))
        filled[: self.own] = first
        everyone = first.new_empty((self._ranks * self._most, *first.shape[1:]))
        dist.all_gather_into_tensor(everyone, filled, group=self.group)
        return everyone[self._slots].movedim(0, dim)

    def scatter_sum(self, whole: Tensor, dim: int) -> Tensor:
        first = whole.movedim(dim, 0)
        everyone = first.new_zeros((self._ranks * self._most, *first.shape[1:]))
        everyone[self._slots] = first
        mine = first.new_empty((self._most, *first.shape[1:]))
        dist.reduce_scatter_tensor(mine, everyone, group=self.group)
        return mine[: self.own].movedim(0, dim)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, places: Places, dim: int) -> Tensor:
        ctx.places, ctx.dim = places, dim
        return places.gather(part, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.places.scatter_sum(grads[0], ctx.dim), None, None
