"""Every optimizer of torch.optim and transformers' Adafactor under every layout: equal to one process, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, PipelineParallel, TensorParallel
from tests.parallel.world import ROOT, Ranks

SIZES = (2, 4)
TENSOR = {"0": "colwise", "2": "rowwise"}
#: Number of workers -> layouts, each with the columns of the table of which it has something.
LAYOUTS: dict[int, tuple[tuple[Any, tuple[int, ...]], ...]] = {
    2: (
        (DataParallel(), (0,)),
        (FullyShard(), (1,)),
        (TensorParallel(plan=TENSOR), (2,)),
        (PipelineParallel(cut=["2"]), (3,)),
    ),
    4: (
        (DataParallel(2) @ FullyShard(2), (0, 1)),
        (DataParallel(2) @ TensorParallel(2, plan=TENSOR), (0, 2)),
        (FullyShard(2) @ TensorParallel(2, plan=TENSOR), (1, 2)),
        (DataParallel(2) @ PipelineParallel(2, cut=["2"]), (0, 3)),
        (FullyShard(2) @ PipelineParallel(2, cut=["2"]), (1, 3)),
    ),
}


def _batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(8, 12, dtype=torch.float64), torch.randint(0, 5, (8,))) for _ in range(3)]


class _LookedUp(nn.Module):
    """Twelve rows of a table for each row of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.abs() * 7).long() % 20).mean(1)


def _model(optimizer: str) -> nn.Module:
    """A model that the optimizer of this name is for: Muon is for matrices, SparseAdam for sparse gradients."""
    torch.manual_seed(3)
    is_biased = optimizer != "Muon"
    model = nn.Sequential(nn.Linear(12, 16, is_biased), nn.Tanh(), nn.Linear(16, 5, is_biased)).double()
    if optimizer == "SparseAdam":
        model[0] = _LookedUp().double()
        model[2].requires_grad_(False)
    return model


def _optimizers() -> Iterator[tuple[str, Callable[[nn.Module], torch.optim.Optimizer]]]:
    for name, kind in sorted(vars(torch.optim).items()):
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield name, partial(_made, kind)
    if find_spec("transformers") is not None:
        from transformers.optimization import Adafactor

        yield "transformers' Adafactor", lambda model: Adafactor(model.parameters())


def _made(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    return kind([param for param in model.parameters() if param.requires_grad], lr=1e-2)  # type: ignore[no-any-return]


def _alone(make: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module) -> None:
    optimizer = make(model)
    for x, y in _batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def _outcome(make: Callable[[nn.Module], torch.optim.Optimizer], one: nn.Module, strategy: Any, name: str) -> str:
    """What comes of three steps: "equal", or the refusal's sentence, or how it is wrong."""
    model = _model(name)
    microbatches = 2 if "Pipeline" in repr(strategy) else 1
    try:
        par = paceline.parallelize(
            model, make(model), _batches(), loss=F.cross_entropy, strategy=strategy, microbatches=microbatches
        )
        for batch in _batches():
            par.step(batch)
        many = par.full_state_dict()
    except ParallelError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    apart = max(float((value - many[name]).abs().max()) for name, value in one.state_dict().items())
    return "equal" if apart < 1e-9 else f"differs by {apart:.1e}"


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double()


def check_every_optimizer_equals_one_process_or_is_refused(ranks: Ranks) -> None:
    """The table of optimizers in docs/parallel.md is what this finds."""
    found: dict[str, list[str]] = {}
    for name, make in _optimizers():
        with pytest.MonkeyPatch.context() as patched:
            if name == "Muon":
                # It computes in bfloat16, and an order of summing shows in the third digit.
                patched.setattr(Tensor, "bfloat16", _wide)
            one = _model(name)
            if name != "LBFGS":
                _alone(make, one)
            found[name] = [_outcome(make, one, strategy, name) for strategy, _ in LAYOUTS[ranks.size]]
    rows = {}
    for line in (ROOT / "docs" / "parallel.md").read_text().splitlines():
        name, *cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if name in found:
            rows[name] = cells
    assert set(rows) == set(found), "one row for each optimizer"
    for name, outcomes in found.items():
        for (layout, columns), outcome in zip(LAYOUTS[ranks.size], outcomes, strict=True):
            # A product refuses whatever one of its factors refuses.
            refusals = [rows[name][column] for column in columns if rows[name][column] != "equal"]
            cell = refusals[0] if refusals else "equal"
            kind, _, why = cell.partition(": ")
            assert outcome.startswith(kind), f"{name} on {layout}: {outcome}; the table: {cell}"
            assert why in outcome, f"{name} on {layout}: {outcome}; the table: {cell}"
            assert kind in ("equal", "refused")
