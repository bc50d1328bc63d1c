"""Averages of weights and frozen twins, under every layout as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
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
from tests.parallel.kinds.plain import Mixed
from tests.parallel.kinds.plain import vectors as mixture_vectors
from tests.parallel.models import Transformer, plain_tokens
from tests.parallel.world import Ranks

SIZES = (2,)
TENSOR = {"*.0": "colwise", "*.2": "rowwise"}
#: Number of workers -> layouts of the model below.
LAYOUTS: dict[int, tuple[Any, ...]] = {
    2: (DataParallel(), FullyShard(), TensorParallel(plan=TENSOR), PipelineParallel(cut=["target"])),
    4: (
        DataParallel(2) @ FullyShard(2),
        DataParallel(2) @ TensorParallel(2, plan=TENSOR),
        FullyShard(2) @ TensorParallel(2, plan=TENSOR),
        DataParallel(2) @ PipelineParallel(2, cut=["target"]),
        FullyShard(2) @ PipelineParallel(2, cut=["target"]),
    ),
}


class _Net(nn.Module):
    """A network and its target, which is the same one some steps ago, as DQN and BYOL have them."""

    def __init__(self, online: nn.Module) -> None:
        super().__init__()
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.online(x), self.target(x)], -1)


def _loss(output: Tensor, y: Tensor) -> Tensor:
    own, target = output.chunk(2, -1)
    return F.cross_entropy(own.flatten(0, -2), y.flatten()) + (own - target - 1).square().mean()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))


def _vectors(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 12, dtype=torch.float64), torch.randint(0, 5, (rows,))


def _mixed(rows: int) -> tuple[Tensor, Tensor]:
    x, y = mixture_vectors(rows)
    return x.double(), y


@dataclass(frozen=True)
class _Scene:
    """make: the network that has a target. layouts: by the number of workers."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    layouts: Mapping[int, Sequence[Any]]

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(4)
        return [self.batch(8) for _ in range(6)]

    def made(self) -> tuple[_Net, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = _Net(self.make()).double()
        return model, torch.optim.AdamW(model.online.parameters(), lr=1e-2)


SCENES = (
    _Scene(_mlp, _vectors, LAYOUTS),
    _Scene(
        lambda: Transformer(tied=True, depth=2),
        plain_tokens,
        {2: (ContextParallel(),), 4: (DataParallel(2) @ ContextParallel(2), FullyShard(2) @ ContextParallel(2))},
    ),
    _Scene(Mixed, _mixed, {2: (ExpertParallel(),), 4: (DataParallel(2) @ ExpertParallel(2),)}),
)


def _warmed(count: int) -> float:
    return min(0.9, (1 + count) / (10 + count))


def _mix(to: nn.Module, of: nn.Module, keep: float) -> None:
    for own, other in zip(to.parameters(), of.parameters(), strict=True):
        own.data.mul_(keep).add_(other.data, alpha=1 - keep)


def _alone(scene: _Scene, microbatches: int) -> tuple[_Net, list[_Net]]:
    """The model after six steps, and its averages: of decay 0.9, that warms up, and the mean of every second step."""
    model, optimizer = scene.made()
    averages = [copy.deepcopy(model) for _ in range(3)]
    for step, (x, y) in enumerate(scene.batches()):
        optimizer.zero_grad()
        for x_part, y_part in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (_loss(model(x_part), y_part) / microbatches).backward()
        optimizer.step()
        _mix(model.target, model.online, 0.8)
        _mix(averages[0], model, 0.9)
        _mix(averages[1], model, _warmed(step))
        if step % 2:
            _mix(averages[2], model, (step // 2) / (step // 2 + 1))
    return model, averages


def _microbatches(strategy: Any) -> int:
    return 2 if "Pipeline" in repr(strategy) else 1


def _begin(scene: _Scene, strategy: Any) -> tuple[Any, list[Any]]:
    model, optimizer = scene.made()
    microbatches = _microbatches(strategy)
    par = paceline.parallelize(
        model, optimizer, scene.batches(), loss=_loss, strategy=strategy, microbatches=microbatches
    )
    par.average(0.8, of="online", into="target")
    return par, [par.average(decay=0.9), par.average(decay=_warmed), par.average(every=2)]


def _assert_same(state: dict[str, Tensor], expected: nn.Module, what: str) -> None:
    assert set(state) == set(expected.state_dict())
    for name, value in expected.state_dict().items():
        apart = float((value - state[name]).abs().max())
        assert apart < 1e-12, f"{what}: {name} differs by {apart:g}"


def _assert_equal(par: Any, averages: list[Any], alone: tuple[_Net, list[_Net]]) -> None:
    model, expected = alone
    _assert_same(par.full_state_dict(), model, f"{par.world.layout}, the model and its twin")
    for number, (average, one) in enumerate(zip(averages, expected, strict=True)):
        _assert_same(average.full_state_dict(), one, f"{par.world.layout}, average {number}")
    _assert_same(par.full_state_dict(), model, f"{par.world.layout}, the model afterwards")


def check_moving_averages_and_frozen_targets_equal_one_process(ranks: Ranks, sizes: Any = (2, 4)) -> None:
    for scene in SCENES:
        for strategy in scene.layouts[ranks.size]:
            alone = _alone(scene, _microbatches(strategy))
            par, averages = _begin(scene, strategy)
            for batch in scene.batches():
                par.step(batch)
            _assert_equal(par, averages, alone)
            x, y = scene.batches()[0]
            with averages[0].applied():
                found = par.evaluate([(x, y)])
                with pytest.raises(
                    ParallelError, match=r"step\(\) was called while the average is in the model's place"
                ):
                    par.step((x, y))
            assert abs(float(found) - float(_loss(alone[1][0](x), y).detach())) < 1e-12
            _assert_equal(par, averages, alone)


def check_moving_averages_resume_from_a_checkpoint_of_another_layout(ranks: Ranks, sizes: Any = (2, 4)) -> None:
    for number, scene in enumerate(SCENES):
        # Use only layouts with one microbatch, as in the reference training.
        layouts = [one for one in scene.layouts[ranks.size] if _microbatches(one) == 1] + [DataParallel()]
        alone = _alone(scene, 1)
        for place, strategy in enumerate(layouts):
            par, _ = _begin(scene, strategy)
            for batch in scene.batches()[:3]:
                par.step(batch)
            path = ranks.folder / f"{number}_{place}"
            par.save(path)
            other, averages = _begin(scene, layouts[place - 1])
            other.load(path)
            for batch in scene.batches()[3:]:
                other.step(batch)
            _assert_equal(other, averages, alone)
            other.average()
            with pytest.raises(ParallelError, match=r"it has 4 averages, and this training 5: call par\.average\(\)"):
                other.load(path)


def check_average_into_a_mismatched_module_is_refused(ranks: Ranks) -> None:
    model, optimizer = SCENES[0].made()
    batches = SCENES[0].batches()
    par = paceline.parallelize(model, optimizer, batches, loss=_loss, strategy=DataParallel())
    with pytest.raises(ParallelError, match="has no part 'teacher'"):
        par.average(0.9, of="online", into="teacher")
    with pytest.raises(ParallelError, match=r"online\.0\.weight is trained itself"):
        par.average(0.9, of="target", into="online")
    with pytest.raises(ParallelError, match=r"'bias' has the shape \[16\] in the one and \[5\] in the other"):
        par.average(0.9, of="online.0", into="target.2")
    with pytest.raises(ParallelError, match=r"decay=1\.5"):
        par.average(1.5)
    with pytest.raises(ParallelError, match="give both, or neither"):
        par.average(0.9, of="online")
