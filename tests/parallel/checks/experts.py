"""Experts on several workers: equal to one process, each holding its own alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, ExpertParallel, FullyShard, ParallelError
from paceline.parallel.reduce import local
from tests.parallel.equality import adamw, alone, assert_equal, batches, made, together
from tests.parallel.kinds.plain import CLASSES, WIDTH, Mixed, vectors
from tests.parallel.models import Case
from tests.parallel.world import Ranks

SIZES = (2,)

FLOAT64 = 1e-10
MIXED = Case(name="mixed", make=Mixed, batch=vectors)


class Fused(nn.Module):
    """Experts in one module, called as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        # Like older versions of transformers, this one-hot encoding has room only for the existing experts.
        asked = F.one_hot(top_k_index, self.num_experts)
        for number in range(self.num_experts):
            row, place = torch.where(asked[..., number] > 0)
            out = out.index_add(0, row, (hidden_states[row] @ self.up[number]) * top_k_weights[row, place, None])
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, CLASSES)
        self.fused, self.drop = Fused(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        # Each row uses one expert, so some workers may use none of their experts.
        gates, chosen = self.router(x).softmax(-1).topk(1)
        return self.last(self.drop(x + self.fused(x, chosen, gates)))


ROUTED = Case(name="routed", make=Routed, batch=vectors)


def check_expert_parallel_steps_equal_one_process(ranks: Ranks, sizes: Any = (2, 4)) -> None:
    options: dict[str, Any] = {"rows": (8, 1, 5), "clip_norm": 0.05, "microbatches": 2}
    layouts: list[Any] = (
        [ExpertParallel()] if ranks.size == 2 else [ExpertParallel(), DataParallel(2) @ ExpertParallel(2)]
    )
    whole = [(case, layouts) for case in (MIXED, ROUTED)]
    # The models MIXED and ROUTED call experts in two ways. Two workers test both models with all layouts. With four
    # workers, `make test` uses one of these models for each layout.
    covering = whole if ranks.size == 2 else [(MIXED, layouts[1:]), (ROUTED, layouts[:1])]
    for case, several in ranks.cells(covering, whole):
        one = alone(case, **options)
        for layout in several:
            many = together(case, layout, check="first", **options)
            assert_equal(one, many, loss=FLOAT64, gradient=FLOAT64, parameter=FLOAT64)


def check_each_rank_holds_only_its_own_experts(ranks: Ranks) -> None:
    def trained(case: Case, strategy: Any, seed: int = 5) -> Any:
        model, given = made(case, torch.float64, seed), batches(case, torch.float64, (8,))
        options = {"loss": case.loss, "strategy": strategy, "check": "off"}
        return paceline.parallelize(model, adamw(model), given, **options), given[0]

    par, batch = trained(MIXED, ExpertParallel())
    held = [name for name in par.executor.named_parameters() if name.startswith("blocks.0.experts.")]
    assert {name.split(".")[3] for name in held} == {str(2 * ranks.rank), str(2 * ranks.rank + 1)}
    par.step(batch)
    text = par.explain()
    assert "blocks.0: 2 of its 4 experts on each worker" in text, text
    assert "*  ExpertParallel(2)" in text, text
    assert text.forecasts["ExpertParallel(2)"].parameter_bytes < 0.7 * text.forecasts["DataParallel(2)"].parameter_bytes
    for case in (MIXED, ROUTED):
        if case is ROUTED:
            par, batch = trained(case, ExpertParallel())
            par.step(batch)
        par.save(ranks.folder / case.name)
        again, _ = trained(case, FullyShard(), seed=3)
        again.load(ranks.folder / case.name)
        assert abs(float(again.step(batch)) - float(par.step(batch))) < FLOAT64
        whole, other = par.full_state_dict(), again.full_state_dict()
        assert set(whole) == set(made(case, torch.float64).state_dict())
        assert max(float((whole[name] - other[name]).abs().max()) for name in whole) < FLOAT64
        par.save_safetensors(ranks.folder / f"{case.name}-whole")
        model = made(case, torch.float64, seed=8)
        par = paceline.parallelize(
            model, adamw(model), [batch], strategy=ExpertParallel(), weights=ranks.folder / f"{case.name}-whole"
        )
        assert max(float((whole[name] - value).abs().max()) for name, value in par.full_state_dict().items()) == 0.0
    assert local(par.executor.named_parameters()["fused.up"]).shape == (2, WIDTH, WIDTH)


def check_dropout_after_the_experts_is_the_same_on_all_workers(ranks: Ranks) -> None:
    """An expert that draws numbers is on one worker only; dropout behind it has to be the same on all."""
    model = made(MIXED, torch.float64)
    for block in model.blocks:
        block.experts[0] = nn.Sequential(block.experts[0], nn.Dropout(0.5))
    model.last = nn.Sequential(nn.Dropout(0.5), model.last)
    given = batches(MIXED, torch.float64, (8,))
    par = paceline.parallelize(model, adamw(model), given, loss=MIXED.loss, strategy=ExpertParallel())
    loss = par.step(given[0])
    everyone = [torch.empty_like(loss) for _ in range(ranks.size)]
    dist.all_gather(everyone, loss)
    assert len({float(one) for one in everyone}) == 1


def check_experts_that_workers_cannot_divide_evenly_are_refused(ranks: Ranks) -> None:
    model = Mixed()
    for block in model.blocks:
        del block.experts[3]
    with pytest.raises(ParallelError, match=r"blocks\.0\.experts has 3 experts, which 2 workers do not divide"):
        paceline.parallelize(model, adamw(model), [], loss=MIXED.loss, strategy=ExpertParallel())
