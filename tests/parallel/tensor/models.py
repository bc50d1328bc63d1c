"""Models whose layers belong together, or only look so. Imports torch."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH, HEADS, WORDS = 16, 4, 11


class Attention(nn.Module):
    """split: how the code names the heads."""

    def __init__(self, split: str, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.split, self.heads, self.kv_heads, self.width = split, HEADS, kv_heads, WIDTH
        self.head_width = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * self.head_width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows, time, width = x.shape
        heads = {"width": -1, "heads": self.heads, "both": self.heads, "shape": self.heads}[self.split]
        q = self.q(x).view(rows, time, heads, width // heads if self.split == "shape" else self.head_width)
        k, v = (part(x).view(rows, time, -1, self.head_width) for part in (self.k, self.v))
        if self.kv_heads < self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 2) for part in (k, v))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2)
        return self.o(y.reshape(rows, time, self.width if self.split == "both" else -1))


class Fused(nn.Module):
    """q, k and v in one layer: its outputs lie side by side, so that a part of them is not a head's."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Pair(nn.Module):
    """Something between two linear layers."""

    def __init__(self, between: Any, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Tokens(nn.Module):
    """The layer to look at, between an embedding and a head."""

    def __init__(self, inner: nn.Module, *, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.tok = nn.Embedding(WORDS, WIDTH, **options)
        self.inner = inner
        self.head = nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.tok(tokens)))
