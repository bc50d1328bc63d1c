"""Every optimizer of torch.optim and transformers' Adafactor under every layout: equal to one process, or refused by name."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

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
from paceline.parallel.compared import Wide
from tests.parallel.checks.experts import Routed
from tests.parallel.kinds.plain import WIDTH, vectors
from tests.parallel.models import SHALLOW, plain_tokens, token_loss
from tests.parallel.world import ROOT, Ranks

SIZES = (2, 4)
TENSOR = {"0": "colwise", "2": "rowwise"}
#: Number of workers -> (layout, columns of the table in docs/parallel.md that describe it).
LAYOUTS: dict[int, tuple[tuple[Any, tuple[int, ...]], ...]] = {
    2: (
        (DataParallel(), (0,)),
        (FullyShard(), (1,)),
        (TensorParallel(plan=TENSOR), (2,)),
        (PipelineParallel(cut=["2"]), (3,)),
        (ContextParallel(), (4,)),
        (ExpertParallel(), (5,)),
    ),
    4: (
        (DataParallel(2) @ FullyShard(2), (0, 1)),
        (DataParallel(2) @ TensorParallel(2, plan=TENSOR), (0, 2)),
        (FullyShard(2) @ TensorParallel(2, plan=TENSOR), (1, 2)),
        (DataParallel(2) @ PipelineParallel(2, cut=["2"]), (0, 3)),
        (FullyShard(2) @ PipelineParallel(2, cut=["2"]), (1, 3)),
        (DataParallel(2) @ ContextParallel(2), (0, 4)),
        (FullyShard(2) @ ContextParallel(2), (1, 4)),
        (DataParallel(2) @ ExpertParallel(2), (0, 5)),
    ),
}


class _LookedUp(nn.Module):
    """Twelve rows of a table for each row of a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(20, width, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.abs() * 7).long() % 20).mean(1)


def _rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 12), torch.randint(0, 5, (count,))


def _layers(is_sparse: bool) -> nn.Module:
    return nn.Sequential(_LookedUp(16) if is_sparse else nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))


def _sequences(is_sparse: bool) -> nn.Module:
    model = SHALLOW["transformer_untied"].make()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = is_sparse
    return model


def _experts(is_sparse: bool) -> nn.Module:
    return nn.Sequential(_LookedUp(WIDTH), Routed()) if is_sparse else Routed()


@dataclass(frozen=True)
class _Training:
    """A model that a layout is for, with its batches and its loss."""

    make: Callable[[bool], nn.Module]
    rows: Callable[[int], tuple[Tensor, Tensor]] = _rows
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(4)
        found = [self.rows(8) for _ in range(3)]
        return [(x.double() if x.is_floating_point() else x, y) for x, y in found]

    def model(self, optimizer: str) -> nn.Module:
        """Return a model for the optimizer of this name: Muon takes matrices, SparseAdam sparse gradients."""
        torch.manual_seed(3)
        is_sparse = optimizer == "SparseAdam"
        model = self.make(is_sparse).double()
        sparse = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding) and one.sparse}
        for param in model.parameters():
            param.requires_grad_((not is_sparse or id(param) in sparse) and (optimizer != "Muon" or param.ndim == 2))
        return model


_PLAIN = _Training(_layers)


def _training(strategy: Any) -> _Training:
    if "Context" in repr(strategy):
        return _Training(_sequences, plain_tokens, token_loss)
    return _Training(_experts, vectors) if "Expert" in repr(strategy) else _PLAIN


def _optimizers() -> Iterator[tuple[str, Callable[[nn.Module], torch.optim.Optimizer]]]:
    for name, kind in sorted(vars(torch.optim).items()):
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield name, partial(_made, kind)
    if find_spec("transformers") is not None:
        from transformers.optimization import Adafactor

        yield "transformers' Adafactor", lambda model: Adafactor(model.parameters())


def _made(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    return kind([param for param in model.parameters() if param.requires_grad], lr=1e-2)  # type: ignore[no-any-return]


def _alone(make: Callable[[nn.Module], torch.optim.Optimizer], name: str, training: _Training) -> nn.Module:
    model = training.model(name)
    if name != "LBFGS":
        optimizer = make(model)
        for x, y in training.batches():
            optimizer.zero_grad()
            training.loss(model(x), y).backward()
            optimizer.step()
    return model


def _outcome(make: Callable[[nn.Module], torch.optim.Optimizer], name: str, strategy: Any) -> str:
    """Return the result of three steps: "equal", or the refusal's sentence, or the difference."""
    training = _training(strategy)
    one, model = _alone(make, name, training), training.model(name)
    microbatches = 2 if "Pipeline" in repr(strategy) else 1
    given = training.batches()
    try:
        par = paceline.parallelize(
            model, make(model), given, loss=training.loss, strategy=strategy, microbatches=microbatches
        )
        for batch in given:
            par.step(batch)
        many = par.full_state_dict()
    except ParallelError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    apart = max(float((value - many[name]).abs().max()) for name, value in one.state_dict().items())
    return "equal" if apart < 1e-9 else f"differs by {apart:.1e}"


def check_every_optimizer_equals_one_process_or_is_refused(ranks: Ranks) -> None:
    """The table of optimizers in docs/parallel.md has these results."""
    found: dict[str, list[str]] = {}
    for name, make in _optimizers():
        # Muon computes in bfloat16, so the order of a sum changes the third digit.
        with Wide() if name == "Muon" else contextlib.nullcontext():
            found[name] = [_outcome(make, name, strategy) for strategy, _ in LAYOUTS[ranks.size]]
    page = (ROOT / "docs" / "parallel.md").read_text()
    (equal,) = re.findall(r"^Equal under every strategy: (.*)\.$", page, re.MULTILINE)
    rows = {name: ["equal"] * 6 for name in re.findall(r"`(\w+)`", equal)}
    strategies = (
        "DataParallel",
        "FullyShard",
        "TensorParallel",
        "PipelineParallel",
        "ContextParallel",
        "ExpertParallel",
    )
    for names, refusing, words in re.findall(
        r"^\| ([^|]+) \| ((?:`\w+Parallel`|`FullyShard`)[^|]*) \| ([^|]+) \|$", page, re.MULTILINE
    ):
        for name in names.split(", "):
            rows[name.strip("`")] = [f"refused: {words}" if f"`{one}`" in refusing else "equal" for one in strategies]
    assert set(rows) == set(found), "one row for each optimizer"
    for name, outcomes in found.items():
        for (layout, columns), outcome in zip(LAYOUTS[ranks.size], outcomes, strict=True):
            # A combination of strategies refuses every optimizer that one of its strategies refuses.
            refusals = [rows[name][column] for column in columns if rows[name][column] != "equal"]
            cell = refusals[0] if refusals else "equal"
            kind, _, why = cell.partition(": ")
            assert outcome.startswith(kind), f"{name} on {layout}: {outcome}; the table: {cell}"
            assert why in outcome, f"{name} on {layout}: {outcome}; the table: {cell}"
            assert kind in ("equal", "refused")
