"""Models whose outer forward is traced. Imports torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Blocks(nn.Module):
    """Four blocks and the `forward` of a test."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.full((width,), 1.5))
        self.register_buffer("shift", torch.arange(float(width)))
        self.mask = torch.tril(torch.ones(width, width))  # a plain attribute, not a buffer


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted() for _ in range(3)])
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
            # Create so many reference cycles that the garbage collector would run if it were enabled.
            for _ in range(2000):
                cycle: list[object] = []
                cycle.append(cycle)
        return x


class Counted(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return self.inner(x) * self.gain


def scaled() -> nn.Module:
    """A model whose forward reads a number of the function that made it."""
    factor = 2.0

    class Scaled(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) * factor
            return x

    return Scaled()
