"""Losses that a comparison might disturb, or that are no mean over rows: trained as in one process, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, TensorParallel
from tests.parallel.world import Ranks

SIZES = (2,)
REPLICAS = (DataParallel(), FullyShard())


class Tower(nn.Module):
    """A mean over tokens and their positions, whose numbers are a buffer that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.last = nn.Embedding(32, 8), nn.Embedding(6, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8).eval()
        self.register_buffer("ids", torch.arange(6)[None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm((self.tokens(x) + self.places(self.ids[:, : x.shape[1]])).mean(1))
        return F.normalize(self.last(found), dim=-1)


class Labelled(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.head(self.tower(x))
        return {"loss": F.cross_entropy(output, labels), "logits": output}


class Pair(nn.Module):
    """Returns a contrastive loss: each row against all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()

    def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        output = 10 * self.left(x) @ self.right(z).t()
        return {"loss": F.cross_entropy(output, torch.arange(len(output))), "logits": output}


def _trained(make: Callable[[], nn.Module], batches: Any, strategy: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    par = paceline.parallelize(model, optimizer, batches, strategy=strategy, **options)
    for batch in batches:
        par.step(batch)
    return par


def _assert_equals_one_process(par: Any, one: nn.Module, limit: float = 1e-10) -> None:
    many = par.full_state_dict()
    for name, value in one.state_dict().items():
        apart = float((value - many[name]).abs().max())
        assert apart < limit, f"{par.world.layout}: {name} differs by {apart:g}"


def _tokens(rows: int = 8) -> Tensor:
    return torch.randint(0, 32, (rows, 6))


def check_model_whose_buffer_autograd_saves_is_compared(ranks: Ranks) -> None:
    torch.manual_seed(4)
    batches = [{"x": _tokens(), "labels": torch.randint(0, 5, (8,))} for _ in range(3)]
    torch.manual_seed(3)
    one = Labelled().double()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        one(**batch)["loss"].backward()
        optimizer.step()
    for strategy in (*REPLICAS, TensorParallel()):
        par = _trained(Labelled, batches, strategy)
        assert "equal to the plain model" in par.compared, par.compared
        _assert_equals_one_process(par, one)


def check_contrastive_loss_of_the_model_itself_is_refused(ranks: Ranks) -> None:
    torch.manual_seed(4)
    batches = [(_tokens(), _tokens())]
    for strategy in REPLICAS:
        with pytest.raises(ParallelError, match="compares the rows of a batch with one another"):
            _trained(Pair, batches, strategy)


def check_training_without_comparison_is_logged_on_rank_0(ranks: Ranks) -> None:
    class Rows(Labelled):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if len(x) < 5:
                raise ValueError("five rows at least")
            return super().forward(x, labels)

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("paceline.parallel.first_check")
    logger.addHandler(handler)
    try:
        batch = {"x": _tokens(24), "labels": torch.randint(0, 5, (24,))}
        par = _trained(Rows, [batch], DataParallel(), microbatches=2)
    finally:
        logger.removeHandler(handler)
    assert len(lines) == (ranks.rank == 0), (lines, par.compared)
    assert all("trained without the comparison" in line and "five rows at least" in line for line in lines)
