"""Models of torch's own parts, in the ways in which people write them. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from paceline.parallel.compared import Wide
from tests.parallel.kinds.kind import Kind

WORDS, LENGTH, WIDTH, CLASSES = 17, 6, 16, 5


def vectors(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(0, CLASSES, (rows,))


def doubled(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].double(), batch[1]


def series(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, LENGTH, WIDTH), torch.randint(0, CLASSES, (rows,))


def measured(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences, and how long each is."""
    return torch.randn(rows, LENGTH, WIDTH), torch.arange(rows) % 4 + 2, torch.randint(0, CLASSES, (rows,))


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, WORDS, (rows, LENGTH)), torch.randint(0, CLASSES, (rows,))


def pairs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, LENGTH, WIDTH), torch.randn(rows, LENGTH - 1, WIDTH), torch.randint(0, CLASSES, (rows,))


def images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 2, 8, 8), torch.randint(0, CLASSES, (rows,))


def named(rows: int) -> dict[str, Tensor]:
    x, y = vectors(rows)
    return {"x": x, "labels": y}


class Tower(nn.Module):
    """Some blocks and a head; a subclass has its differences in its own forward."""

    def __init__(self, block: Callable[[], nn.Module] | None = None, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() if block else Mixer() for _ in range(depth)])
        self.last = nn.Linear(WIDTH, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.last(self.body(x))


class Mixer(nn.Module):
    """A pair that TensorParallel can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


# Recurrent models


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([kind(WIDTH, WIDTH, batch_first=True, **options) for _ in range(2)])
        width = WIDTH * (2 if options.get("bidirectional") else 1)
        self.between = nn.ModuleList([nn.Linear(width, WIDTH) for _ in range(2)])
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, between in zip(self.layers, self.between, strict=True):
            x = between(layer(x)[0])
        return self.last(x[:, -1])


class Stacked(nn.Module):
    """One LSTM of several layers, as in most examples."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.tok(x))
        return self.last(hidden[-1])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=LENGTH)
        return self.last(out.sum(1))


class _PackedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=LENGTH)[0]


class PackedInBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_PackedBlock() for _ in range(2)])
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, lengths)
        return self.last(x.sum(1))


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.second = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), WIDTH)
        state = (h, h)
        for time in range(x.shape[1]):
            h = self.cell(x[:, time], h)
            state = self.second(h, state)
        return self.last(state[0])


class KeepsState(Stacked):
    """Goes on where the last batch has ended, by truncated backpropagation."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.lstm(self.tok(x), self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return self.last(out[:, -1])


# Models with attention


class Whole(nn.Module):
    """nn.Transformer with a mask of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
        return self.last(self.transformer(x, y, tgt_mask=mask).mean(1))


class Unmasked(Whole):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.transformer(x, y).mean(1))


class Encoder(nn.Module):
    def __init__(self, *, masked: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.masked = masked
        self.tok = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = (x == 0) if self.masked else None
        return self.last(self.encoder(self.tok(x), src_key_padding_mask=padding).mean(1))


class Heads(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for attention in self.attention:
            x = x + attention(x, x, x)[0]
        return super().forward(x.mean(1))


# Models with embeddings


class Lookup(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList([Mixer() for _ in range(2)])
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rows(x).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Bags(Lookup):
    def __init__(self) -> None:
        super().__init__(sparse=False)
        self.rows = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.rows(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


# Models that compute something outside of their blocks


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.by, None


class OwnGradient(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Scale.apply(self.body(x), 0.5))


class _CheckpointedBlock(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


class _ScaleBlock(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(super().forward(x), 0.5)


class InPlace(Tower):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        out = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        out[:, : WIDTH // 2] = h[:, WIDTH // 2 :]
        out[:, WIDTH // 2 :] = h[:, : WIDTH // 2]
        return self.last(out)


class InPlaceOfMade(Tower):
    """Changes a part of what a block gave."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) * 1.0
        h[:, 0] = 0.0
        return self.last(h)


class Checkpointed(Tower):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class PyRandom(Tower):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.last(h * random.random())


class NumpyRandom(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) * float(numpy.random.rand()))


class LooksAtValues(Tower):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if h.sum() > 0:
            h = h * 2
        return self.last(h)


class Gradients(Tower):
    """A penalty on the gradient by its own input, as in WGAN-GP."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.last(self.body(x))
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + grad.square().sum(1, keepdim=True)


class Counts(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.body(x)) * (1.0 + 0.1 * self.calls)


class Leaves(Tower):
    """Leaves out a block in each second call."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


class Frozen(Tower):
    def __init__(self) -> None:
        super().__init__()
        for param in self.blocks[0].parameters():
            param.requires_grad_(False)


class Normed(Tower):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(lambda: _NormedBlock(norm))


class _NormedBlock(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = norm(nn.Linear(WIDTH, 2 * WIDTH)), norm(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Lists(nn.Module):
    """Parameters in lists and dicts of torch's, and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 4 for _ in range(3)])
        self.by_name = nn.ParameterDict({"scale": torch.ones(WIDTH), "shift": torch.zeros(WIDTH)})
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(self.shared(x @ weight) * self.by_name["scale"] + self.by_name["shift"])
        return self.last(x)


# Models with convolutions


class Convolved(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        kinds = {"batch": lambda: nn.BatchNorm2d(8), "group": lambda: nn.GroupNorm(2, 8)}
        kinds["instance"] = lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), kinds[norm](), nn.ReLU()) for _ in range(3)]
        )
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x.mean((2, 3)))


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(2, 8, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(8, 8, 3, stride=2, padding=1) for _ in range(2)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, stride=2) for _ in range(2)])
        self.last = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.start(x), []
        for down in self.down:
            kept.append(x)
            x = torch.relu(down(x))
        for up in self.up:
            x = torch.relu(up(x)) + kept.pop()
        return self.last(x).mean((2, 3))


# Models with different types of return values


@dataclass
class Out:
    logits: Tensor
    loss: Tensor | None = None
    hidden: tuple[Tensor, ...] = ()


class OutTuple(NamedTuple):
    logits: Tensor
    hidden: Tensor


class ReturnsDataclass(Tower):
    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        return Out(self.last(h), hidden=(h, x))


class ReturnsNamedTuple(Tower):
    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        return OutTuple(self.last(h), h)


class ReturnsDict(Tower):
    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        return {"logits": self.last(h), "all": [h, {"x": x}]}


class OwnLoss(Tower):
    """Takes the labels, and returns the loss in the requested way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.last(self.body(x))
        loss = F.cross_entropy(logits, labels, reduction="sum" if self.how == "sum" else "mean")
        if self.how == "dataclass":
            return Out(logits, loss)
        if self.how == "tuple":
            return loss, logits
        return {"loss": loss, "logits": logits} if self.how == "dict" else loss


# Models with special losses


class _AuxBlock(Mixer):
    """Keeps what the loss is to add."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        self.aux = h.square().mean()
        return x + self.down(h)


class Experts(nn.Module):
    """A mixture of experts with a router inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out = out.index_add(0, row, expert(x[row]) * gates[row, place, None])
        return x + out


class Mixture(nn.Module):
    """A mixture that returns the sum of its experts' outputs, and the output of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([Mixer() for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        gates, chosen = logits.softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out = out.index_add(0, row, expert(x[row]) * gates[row, place, None])
        return out, logits


class Mixed(nn.Module):
    """Blocks of mixtures beside an expert for all rows, and a loss for the routers among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([Mixture() for _ in range(3)])
        self.shared = nn.ModuleList([Mixer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x, found = torch.tanh(self.first(x)), []
        for block, shared in zip(self.blocks, self.shared, strict=True):
            out, logits = block(x)
            x = x + torch.tanh(out + shared(x))
            found.append(logits.square().mean(-1, keepdim=True))
        return self.last(x) * (1 + 0.1 * torch.stack(found).sum(0))


class OwnWeights(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.scale, target)


def with_aux(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Adds what the blocks keep of their calls, as losses of mixtures of experts do."""
    return lambda out, y: F.cross_entropy(out, y) + 0.1 * sum(block.aux for block in model.blocks)


def with_penalty(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, y: F.cross_entropy(out, y) + 0.1 * sum(param.square().sum() for param in model.parameters())


def with_last(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, y: F.cross_entropy(out, y) + 0.1 * model.last.weight.square().sum()


def with_activations(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Reads what a hook has collected."""
    seen: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["first"] = output

    model.blocks[0].register_forward_hook(keep)
    return lambda out, y: F.cross_entropy(out, y) + 0.1 * seen["first"].square().mean()


def with_own_number(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Reads a number and a buffer of the model that no forward changes."""
    model.register_buffer("weights", torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64))
    model.smoothing = 0.1
    return lambda out, y: F.cross_entropy(out * model.weights, y, label_smoothing=model.smoothing)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Turn() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[:, :CLASSES]


class _Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.by.dtype) @ self.by).abs()


def compiled(how: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Tower()
        if how == "model":
            return torch.compile(model, backend="eager")  # type: ignore[return-value]
        if how == "method":
            model.compile(backend="eager")
        for index, block in enumerate(model.blocks):
            if how == "blocks":
                model.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]
        return model

    return make


def scripted() -> nn.Module:
    model = Tower()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.jit.script(block)
    return model


class Shapes(Tower):
    """einsum, chunk, view, stack and others in the outer forward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        one, two = h.chunk(2, -1)
        h = torch.cat([one * two.sigmoid(), torch.stack([one, two]).amax(0)], -1)
        h = torch.einsum("bi,bj->bij", h, h).flatten(1).view(len(x), WIDTH, WIDTH).mean(1)
        return self.last(torch.where(h > 0, h, 0.1 * h))


class Vmapped(Tower):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.last(torch.func.vmap(lambda row: row * row.norm())(h))


class Branches(Tower):
    """Two towers on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Tower(depth=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x)) + self.other(x)


def sequential() -> nn.Module:
    return nn.Sequential(
        *(part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())), nn.Linear(WIDTH, 5)
    )


def old_weight_norm(module: nn.Module) -> nn.Module:
    return nn.utils.weight_norm(module)


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2])


class WideMuon(torch.optim.Muon):
    """Muon with its Newton-Schulz iteration in the parameters' own type."""

    def step(self, *args: Any) -> Any:
        with Wide():  # type: ignore[no-untyped-call]
            return super().step(*args)


def wide_muon(params: Any) -> torch.optim.Optimizer:
    return WideMuon([param for param in params if param.dim() == 2])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


MOVE = "move that line into a module of its own"
VALUES = {
    "pipe": f"can't be cut into stages: .*plain.py:.* (asks for a tensor's values|depends on a tensor's values).*{MOVE}"
}
SPARSE = "rows has sparse gradients .*sparse=False, or use PipelineParallel"
WHOLE = "finds no layer of .* that it can cut"
SUM = "before the first step.* it is a sum. .*reduction='mean'"
COMPARES = "before the first step.* compares the rows of a batch with one another"
COMPILED = {"tensor": "is compiled, .*Give parallelize the model before torch.compile"}
SCRIPTED = "blocks.0 is a module of TorchScript .*Give the module before torch.jit"
LEFT = r"the loss reads .* at .*plain\.py.*, which a call of the model has left there.* return that tensor"
WITH_PARTS = r"the loss reads .* of the model itself at .*plain\.py"

KINDS: dict[str, Kind] = {
    "tower": Kind(
        make=Tower,
        batch=vectors,
        refused={
            "context": r"on context 2 the model can't compute the first rows .*plain\.py:",
            "expert": "finds no experts in Tower: .*named 'experts'",
        },
    ),
    "sequential": Kind(make=sequential, batch=vectors),
    "lstm": Kind(make=lambda: Recurrent(nn.LSTM), batch=series),
    "gru": Kind(make=lambda: Recurrent(nn.GRU), batch=series),
    "lstm-both-ways": Kind(make=lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2), batch=series),
    "lstm-stacked": Kind(make=Stacked, batch=tokens),
    "packed": Kind(make=Packed, batch=measured, refused=VALUES),
    "packed-in-blocks": Kind(make=PackedInBlocks, batch=measured),
    "cells": Kind(make=Cells, batch=series),
    "keeps-state": Kind(make=KeepsState, batch=tokens, refused={"pipe": "it changes 'hidden'.*do it inside a block"}),
    "transformer": Kind(make=Whole, batch=pairs),
    "transformer-unmasked": Kind(make=Unmasked, batch=pairs),
    "encoder": Kind(make=Encoder, batch=tokens),
    "encoder-masked": Kind(make=lambda: Encoder(masked=True), batch=tokens),
    "heads": Kind(make=Heads, batch=series),
    "lookup": Kind(make=lambda: Lookup(sparse=False), batch=tokens),
    "lookup-sparse": Kind(
        make=lambda: Lookup(sparse=True),
        batch=tokens,
        optimizer=sgd,
        refused={"data": SPARSE, "shard": SPARSE, "tensor": SPARSE},
    ),
    "bags": Kind(make=Bags, batch=tokens),
    "own-gradient": Kind(make=OwnGradient, batch=vectors),
    "own-gradient-in-blocks": Kind(make=lambda: Tower(_ScaleBlock), batch=vectors),
    "in-place": Kind(make=InPlace, batch=vectors),
    "in-place-of-made": Kind(make=InPlaceOfMade, batch=vectors),
    "checkpointed": Kind(make=lambda: Checkpointed(reentrant=False), batch=vectors),
    "checkpointed-reentrant": Kind(make=lambda: Checkpointed(reentrant=True), batch=vectors),
    "checkpointed-in-blocks": Kind(make=lambda: Tower(_CheckpointedBlock), batch=vectors),
    "looks-at-values": Kind(
        make=LooksAtValues,
        batch=vectors,
        refused=VALUES | {"data": COMPARES, "shard": COMPARES},
    ),
    "gradients": Kind(
        make=Gradients,
        batch=vectors,
        refused={
            "pipe": "plain.py.*`requires_grad_` begins a graph of its own",
            "shard": "on .* the model can't compute the first rows of the first batch, which it can in one process",
            "tensor": "the gradient of .* differs",
        },
    ),
    "counts": Kind(make=Counts, batch=vectors, refused={"pipe": "self.calls .= 1`: it changes 'calls'"}),
    "unused": Kind(make=Leaves, batch=vectors),
    "frozen": Kind(make=Frozen, batch=vectors),
    "weight-norm": Kind(make=lambda: Normed(parametrizations.weight_norm), batch=vectors),
    "weight-norm-old": Kind(make=lambda: Normed(old_weight_norm), batch=vectors),
    "spectral-norm": Kind(make=lambda: Normed(parametrizations.spectral_norm), batch=vectors),
    "lists": Kind(make=Lists, batch=vectors),
    "conv-batch": Kind(
        make=lambda: Convolved("batch"), batch=images, refused={"context": "normalises over a batch.* Use LayerNorm"}
    ),
    "conv-group": Kind(make=lambda: Convolved("group"), batch=images),
    "conv-instance": Kind(make=lambda: Convolved("instance"), batch=images),
    "unet": Kind(make=Unet, batch=images, refused={"tensor": WHOLE}),
    "dataclass": Kind(make=ReturnsDataclass, batch=vectors, loss=lambda out, y: F.cross_entropy(out.logits, y)),
    "named-tuple": Kind(make=ReturnsNamedTuple, batch=vectors, loss=lambda out, y: F.cross_entropy(out[0], y)),
    "dict": Kind(make=ReturnsDict, batch=vectors, loss=lambda out, y: F.cross_entropy(out["logits"], y)),
    "own-loss-dataclass": Kind(make=lambda: OwnLoss("dataclass"), batch=named, loss=None),
    "own-loss-dict": Kind(make=lambda: OwnLoss("dict"), batch=named, loss=None),
    "own-loss-tuple": Kind(make=lambda: OwnLoss("tuple"), batch=vectors, loss=None),
    "own-loss-tensor": Kind(make=lambda: OwnLoss("tensor"), batch=vectors, loss=None),
    "own-loss-sum": Kind(
        make=lambda: OwnLoss("sum"),
        batch=vectors,
        loss=None,
        refused=dict.fromkeys(("data", "shard", "pipe", "tensor"), SUM),
    ),
    "experts": Kind(
        make=lambda: Tower(Experts),
        batch=vectors,
        refused={
            "expert": r"before the first step.* Does a mixture of experts add something .*\(a shared expert, its input\)"
        },
    ),
    "mixture": Kind(make=Mixed, batch=vectors),
    "loss-reads-aux": Kind(
        make=lambda: Tower(_AuxBlock), batch=vectors, loss_of=with_aux, refused={"pipe": LEFT, "tensor": WITH_PARTS}
    ),
    "loss-reads-all-parameters": Kind(
        make=Tower,
        batch=vectors,
        loss_of=with_penalty,
        refused={
            "shard": WITH_PARTS,
            "tensor": WITH_PARTS,
            "shard@pipe": "the loss reads .*, which is in another stage than the loss",
        },
    ),
    "loss-reads-parameter": Kind(make=Tower, batch=vectors, loss_of=with_last),
    "loss-reads-activations": Kind(make=Tower, batch=vectors, loss_of=with_activations, refused={"pipe": LEFT}),
    "loss-reads-numbers": Kind(make=Tower, batch=vectors, loss_of=with_own_number),
    "loss-learns": Kind(make=Tower, batch=vectors, loss=OwnWeights()),
    "complex": Kind(
        make=Turned,
        batch=lambda rows: doubled(vectors(rows)),
        dtype=None,
        refused={"data": "blocks.0.by is complex, .*FullyShard", "data@pipe": None, "tensor": WHOLE},
    ),
    "compiled": Kind(make=compiled("model"), batch=vectors, refused=COMPILED),
    "compiled-method": Kind(make=compiled("method"), batch=vectors, refused=COMPILED),
    "compiled-blocks": Kind(make=compiled("blocks"), batch=vectors, refused=COMPILED),
    "scripted": Kind(make=scripted, batch=vectors, refused={"tensor": SCRIPTED, "shard": SCRIPTED}),
    "shapes": Kind(make=Shapes, batch=vectors),
    "vmapped": Kind(make=Vmapped, batch=vectors, refused={"pipe": f"plain.py:.*BatchedTensor.*{MOVE}"}),
    "branches": Kind(make=Branches, batch=vectors),
    "python-random": Kind(
        make=PyRandom,
        batch=vectors,
        refused={"pipe": "PyRandom.*it draws from Python's", "tensor": "draws from Python's.*Draw with torch"},
    ),
    "numpy-random": Kind(
        make=NumpyRandom,
        batch=vectors,
        refused={"pipe": "NumpyRandom.*it draws from numpy's", "tensor": "draws from numpy's.*Draw with torch"},
    ),
    "adafactor": Kind(
        make=Tower,
        batch=vectors,
        optimizer=lambda params: torch.optim.Adafactor(params, lr=1e-2),
        refused={"shard": "Adafactor looks at whole matrices", "tensor": "Adafactor looks at whole matrices"},
    ),
    # Muon computes in bfloat16, so its limit is larger. `muon-wide` computes in float64.
    "muon": Kind(make=Tower, batch=vectors, optimizer=muon, limit=1e-3, steps=3),
    "muon-wide": Kind(make=Tower, batch=vectors, optimizer=wide_muon),
    "sum": Kind(
        make=Tower,
        batch=vectors,
        loss=lambda out, y: F.cross_entropy(out, y, reduction="sum"),
        refused=dict.fromkeys(("data", "shard", "pipe", "tensor"), SUM),
    ),
}
