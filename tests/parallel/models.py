"""The models that every layout is proved on, each with its batches and its loss. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.parallel import world

VOCABULARY = 17
IGNORED = -100


class Mlp(nn.Module):
    def __init__(self, width: int = 24, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


class Cnn(nn.Module):
    """norm: "group" or "batch"."""

    def __init__(self, norm: str, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            normal = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(2, width)
            # No bias before batch normalisation: its true gradient is 0, and AdamW would turn rounding errors into steps.
            convolution = nn.Conv2d(width, width, 3, padding=1, bias=norm != "batch")
            self.blocks.append(nn.Sequential(convolution, normal, nn.ReLU()))
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (
            # The keys have no bias, because it cancels out in the softmax and AdamW would turn rounding errors into steps.
            nn.Linear(width, width, bias=part != "k")
            for part in "qkvo"
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.o(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self, *, tied: bool, width: int = 16, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, width)
        self.pos = nn.Embedding(8, width)
        self.blocks = nn.ModuleList([Block(width, 4, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LongSkip(nn.Module):
    """What the first layer gives is used again by the last."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.last = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.first(x))
        x = skip
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(torch.cat([x, skip], -1))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the tokens that count."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def count_tokens(target: Tensor) -> int:
    return int((target != IGNORED).sum())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to be proved on: `make()` builds it, `batch(rows)` draws inputs and targets from torch's generator."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy
    loss_weight: Callable[[Any], Any] | None = None


def vectors(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 12), torch.randint(0, 5, (rows,))


def images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 1, 6, 6), torch.randint(0, 5, (rows,))


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, VOCABULARY, (rows, 9))
    target = drawn[:, 1:].clone()
    # The rows have unequal numbers of counted tokens, so a mean of means differs from the mean over all tokens.
    for row in range(rows):
        target[row, : row % 5] = IGNORED
    return drawn[:, :-1], target


def plain_tokens(rows: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, VOCABULARY, (rows, 9))
    return drawn[:, :-1], drawn[:, 1:].clone()


def dropping(dropout: float, depth: int = 2) -> Case:
    """Return a transformer with this probability of dropout."""
    make = partial(Transformer, tied=True, depth=depth, dropout=dropout)
    return Case(name="dropout", make=make, batch=plain_tokens, loss=token_loss)


CASES = {
    case.name: case
    for case in (
        Case(name="mlp", make=Mlp, batch=vectors),
        Case(name="cnn_group", make=lambda: Cnn("group"), batch=images),
        Case(name="cnn_batch", make=lambda: Cnn("batch"), batch=images),
        Case(
            name="transformer_tied",
            make=lambda: Transformer(tied=True),
            batch=tokens,
            loss=token_loss,
            loss_weight=count_tokens,
        ),
        Case(name="transformer_untied", make=lambda: Transformer(tied=False), batch=plain_tokens, loss=token_loss),
        Case(name="long_skip", make=LongSkip, batch=vectors),
    )
}

# `world` repeats the names, because pytest collects the tests without torch.
assert tuple(CASES) == world.CASES

#: The same models with two blocks, for checks that more blocks would only slow down.
SHALLOW = CASES | {
    name: replace(CASES[name], make=lambda tied=tied: Transformer(tied=tied, depth=2))
    for name, tied in (("transformer_tied", True), ("transformer_untied", False))
}

#: Models that are also trained on more than two workers, because these could train them wrongly: one model has batch
#: statistics, one has tied weights, and one has a value that skips stages.
_ON_MORE = ("cnn_batch", "transformer_tied", "long_skip")


#: Models that a layout is most likely to train wrongly: one has batch statistics, and one has tied weights.
RISKIEST = ("cnn_batch", "transformer_tied")


def on(size: int, cases: dict[str, Case] = CASES) -> list[Case]:
    """Those for so many workers: all on two, and on more those of which their number could make something else."""
    return [case for name, case in cases.items() if size == 2 or name in _ON_MORE]
