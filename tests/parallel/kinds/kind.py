"""A kind of model, trained by a plain loop in one process and by each layout. Imports torch."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    FullyShard,
    ParallelError,
    PipelineParallel,
    TensorParallel,
)
from tests.parallel.equality import of_first_rank

ROWS = 8
MICROBATCHES = 2
#: Largest allowed difference of losses, parameters and buffers after steps of AdamW in float64.
EQUAL = 1e-9

#: Name of a layout -> (number of workers, layout). Every kind of model is tested with the layouts that are not in
#: `RARE`.
LAYOUTS: dict[str, tuple[int, Any]] = {
    "data": (2, DataParallel()),
    "shard": (2, FullyShard()),
    "pipe": (2, PipelineParallel()),
    "tensor": (2, TensorParallel()),
    "data@pipe": (4, DataParallel(2) @ PipelineParallel(2)),
    "shard@pipe": (4, FullyShard(2) @ PipelineParallel(2)),
    "data@tensor": (4, DataParallel(2) @ TensorParallel(2)),
    "context": (2, ContextParallel()),
    "expert": (2, ExpertParallel()),
    "data@context": (4, DataParallel(2) @ ContextParallel(2)),
    "shard@context": (4, FullyShard(2) @ ContextParallel(2)),
    "data@expert": (4, DataParallel(2) @ ExpertParallel(2)),
}
#: Layouts that only models for sequences or mixtures of experts can use.
RARE = {"context", "expert", "data@context", "shard@context", "data@expert"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model to be trained by every layout.

    batch: rows -> a global batch, as a loader gives it. loss: None takes the model's own. loss_of: a model -> its loss.
    refused: part of a layout's name -> what the sentence says with which it is refused. limit: by how far numbers may differ.
    steps: the second one begins with what the first has made of parameters and of the optimizer's state.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Any = F.cross_entropy
    loss_of: Callable[[Any], Any] | None = None
    loss_weight: Callable[[Any], Any] | None = None
    split: Callable[[Any], Any] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    refused: Mapping[str, str | None] = field(default_factory=dict)
    limit: float = EQUAL
    dtype: torch.dtype | None = torch.float64
    steps: int = 2

    def refusal(self, layout: str) -> str | None:
        """What the sentence says with which this layout refuses it; None: it trains it."""
        # A pipeline traces the forward before the other strategies try anything, so its refusal comes first.
        parts = sorted(layout.split("@"), key=lambda part: part != "pipe")
        return next((self.refused[part] for part in (layout, *parts) if part in self.refused), None)


@dataclass
class Trained:
    """Losses of the steps, and the state dict after them."""

    losses: list[float]
    state: Mapping[str, Tensor]

    def apart(self, other: Trained) -> tuple[float, str]:
        """Return the largest distance, and the name of its value."""
        found = [(abs(a - b), "loss") for a, b in zip(self.losses, other.losses, strict=True)]
        mine, theirs = self.state, other.state
        assert set(mine) == set(theirs), f"names on one side alone: {sorted(set(mine) ^ set(theirs))}"
        for name, value in mine.items():
            given = theirs[name]
            assert value.shape == given.shape, f"{name}: {list(value.shape)} and {list(given.shape)}"
            if value.numel():
                wide = torch.complex128 if value.is_complex() else torch.float64
                found.append((float((value.cpu().to(wide) - given.cpu().to(wide)).abs().max()), name))
        # NaN counts as the largest difference.
        return max(found, key=lambda one: float("inf") if one[0] != one[0] else one[0])


def made(kind: Kind, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    model = kind.make()
    if kind.dtype is not None:
        model.to(kind.dtype)
    return model


def with_loss(kind: Kind, model: nn.Module) -> Kind:
    return kind if kind.loss_of is None else dataclasses.replace(kind, loss=kind.loss_of(model))


def batches(kind: Kind, seed: int = 7) -> list[Any]:
    torch.manual_seed(seed)
    return [cast(kind.batch(ROWS), kind.dtype) for _ in range(kind.steps)]


def optimizer_of(kind: Kind, model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=1e-2) if kind.optimizer is None else kind.optimizer(params)


def alone(kind: Kind) -> Trained:
    """A plain loop in one process that accumulates over the microbatches; no code of ours. Called on all ranks."""
    return of_first_rank(lambda: _alone(kind))


def _alone(kind: Kind) -> Trained:
    model = made(kind)
    kind = with_loss(kind, model)
    optimizer = optimizer_of(kind, model)
    losses = []
    for batch in batches(kind):
        optimizer.zero_grad()
        pieces = [rows(batch, part) for part in torch.arange(ROWS).tensor_split(MICROBATCHES)]
        weights = [float(_weigh(kind, piece)) for piece in pieces]
        total = 0.0
        for piece, weight in zip(pieces, weights, strict=True):
            loss = _loss(kind, model, piece) * (weight / sum(weights))
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return Trained(losses, {name: value.detach().clone() for name, value in model.state_dict().items()})


def together(kind: Kind, strategy: Any, **options: Any) -> Trained:
    """The same with Paceline, on the ranks of this world."""
    model, given = made(kind), batches(kind)
    kind = with_loss(kind, model)
    par = paceline.parallelize(
        model,
        optimizer_of(kind, model),
        given,
        loss=kind.loss,
        loss_weight=kind.loss_weight,
        split=kind.split,
        strategy=strategy,
        **({"microbatches": MICROBATCHES} | options),
    )
    losses = [float(par.step(batch)) for batch in given]
    return Trained(losses, par.full_state_dict())


def judged(kind: Kind, layout: str, one: Trained | None) -> str:
    """Return the error of this kind on this layout, or "". Called on all ranks. one: the result of a plain loop."""
    refusal = kind.refusal(layout)
    try:
        many = together(kind, LAYOUTS[layout][1])
    except ParallelError as error:
        text = " ".join(str(error).split())
        if refusal is None:
            return f"refused: {text}"
        return "" if re.search(refusal, text) else f"refused with other words: {text}"
    if refusal is not None:
        return "trained, and not refused"
    assert one is not None
    apart, name = one.apart(many)
    return "" if apart <= kind.limit else f"{name} differs by {apart:.1e}"


def _loss(kind: Kind, model: nn.Module, batch: Any) -> Tensor:
    args, kwargs, target = _parts(kind, batch)
    output = model(*args, **kwargs)
    if kind.loss is not None:
        return kind.loss(output, target)
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output["loss"] if isinstance(output, Mapping) else output.loss


def _parts(kind: Kind, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any], Any]:
    if kind.split is not None:
        return kind.split(batch)
    if isinstance(batch, Mapping):
        named = dict(batch)
        target = named.get("labels") if kind.loss is None else named.pop("labels")
        return (), named, target
    return (batch, {}, batch[-1]) if kind.loss is None else (batch[:-1], {}, batch[-1])


def _weigh(kind: Kind, piece: Any) -> Any:
    target = _parts(kind, piece)[2]
    if kind.loss_weight is not None:
        return kind.loss_weight(target)
    return len(next(value for value in leaves(piece) if isinstance(value, Tensor)))


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def change(value: Any, how: Callable[[Tensor], Tensor]) -> Any:
    """The same containers with another tensor for each."""
    if isinstance(value, Tensor):
        return how(value)
    if isinstance(value, Mapping):
        return type(value)({name: change(item, how) for name, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        return type(value)(change(item, how) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {item.name: change(getattr(value, item.name), how) for item in dataclasses.fields(value)}
        return dataclasses.replace(value, **named)
    return value


def rows(batch: Any, part: Tensor) -> Any:
    return change(batch, lambda tensor: tensor[part] if tensor.dim() else tensor)


def cast(batch: Any, dtype: torch.dtype | None) -> Any:
    return change(batch, lambda tensor: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
