"""Averages of weights and frozen twins, under every layout as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, PipelineParallel, TensorParallel
from tests.parallel.world import Ranks

SIZES = (2,)
LAYOUTS = (
    DataParallel(),
    FullyShard(),
    TensorParallel(plan={"*.0": "colwise", "*.2": "rowwise"}),
    PipelineParallel(cut=["target"]),
)


class _Net(nn.Module):
    """A network and its target, which is the same one some steps ago, as DQN and BYOL have them."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.online(x), self.target(x)], 1)


def _loss(output: Tensor, y: Tensor) -> Tensor:
    own, target = output.chunk(2, 1)
    return F.cross_entropy(own, y) + (own - target - 1).square().mean()


def _batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(8, 12, dtype=torch.float64), torch.randint(0, 5, (8,))) for _ in range(6)]


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = _Net().double()
    return model, torch.optim.AdamW(model.online.parameters(), lr=1e-2)


def _warmed(count: int) -> float:
    return min(0.9, (1 + count) / (10 + count))


def _mix(to: nn.Module, of: nn.Module, keep: float) -> None:
    for own, other in zip(to.parameters(), of.parameters(), strict=True):
        own.data.mul_(keep).add_(other.data, alpha=1 - keep)


def _alone() -> tuple[nn.Module, list[nn.Module]]:
    """The model after six steps, and its averages: of decay 0.9, that warms up, and the mean of every second step."""
    model, optimizer = _made()
    averages = [copy.deepcopy(model) for _ in range(3)]
    for step, (x, y) in enumerate(_batches()):
        optimizer.zero_grad()
        _loss(model(x), y).backward()
        optimizer.step()
        _mix(model.target, model.online, 0.8)
        _mix(averages[0], model, 0.9)
        _mix(averages[1], model, _warmed(step))
        if step % 2:
            _mix(averages[2], model, (step // 2) / (step // 2 + 1))
    return model, averages


def _begin(strategy: Any) -> tuple[Any, list[Any]]:
    model, optimizer = _made()
    microbatches = 2 if isinstance(strategy, PipelineParallel) else 1
    par = paceline.parallelize(model, optimizer, _batches(), loss=_loss, strategy=strategy, microbatches=microbatches)
    par.average(0.8, of="online", into="target")
    return par, [par.average(decay=0.9), par.average(decay=_warmed), par.average(every=2)]


def _assert_same(state: dict[str, Tensor], expected: nn.Module, what: str) -> None:
    assert set(state) == set(expected.state_dict())
    for name, value in expected.state_dict().items():
        apart = float((value - state[name]).abs().max())
        assert apart < 1e-12, f"{what}: {name} differs by {apart:g}"


def _assert_equal(par: Any, averages: list[Any]) -> None:
    model, expected = _alone()
    _assert_same(par.full_state_dict(), model, f"{par.world.layout}, the model and its twin")
    for number, (average, one) in enumerate(zip(averages, expected, strict=True)):
        _assert_same(average.full_state_dict(), one, f"{par.world.layout}, average {number}")
    _assert_same(par.full_state_dict(), model, f"{par.world.layout}, the model afterwards")


def check_averages_and_a_frozen_twin_equal_one_process(ranks: Ranks) -> None:
    for strategy in LAYOUTS:
        par, averages = _begin(strategy)
        for batch in _batches():
            par.step(batch)
        _assert_equal(par, averages)
        _, expected = _alone()
        x, y = _batches()[0]
        with averages[0].applied():
            found = par.evaluate([(x, y)])
            with pytest.raises(ParallelError, match=r"step\(\) was called while the average is in the model's place"):
                par.step((x, y))
        assert abs(float(found) - float(_loss(expected[0](x), y).detach())) < 1e-12
        _assert_equal(par, averages)


def check_averages_go_on_from_a_checkpoint_of_another_layout(ranks: Ranks) -> None:
    for number, strategy in enumerate(LAYOUTS):
        par, _ = _begin(strategy)
        for batch in _batches()[:3]:
            par.step(batch)
        path = ranks.folder / str(number)
        par.save(path)
        other, averages = _begin(LAYOUTS[number - 1])
        other.load(path)
        for batch in _batches()[3:]:
            other.step(batch)
        _assert_equal(other, averages)
        other.average()
        with pytest.raises(ParallelError, match=r"it has 4 averages, and this training 5: call par\.average\(\)"):
            other.load(path)


def check_twins_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    model, optimizer = _made()
    par = paceline.parallelize(model, optimizer, _batches(), loss=_loss, strategy=DataParallel())
    with pytest.raises(ParallelError, match="has no part 'teacher'"):
        par.average(0.9, of="online", into="teacher")
    with pytest.raises(ParallelError, match=r"online\.0\.weight is trained itself"):
        par.average(0.9, of="target", into="online")
    with pytest.raises(ParallelError, match=r"'bias' has the shape \[16\] in the one and \[5\] in the other"):
        par.average(0.9, of="online.0", into="target.2")
    with pytest.raises(ParallelError, match=r"decay=1\.5"):
        par.average(1.5)
    with pytest.raises(ParallelError, match="give both names"):
        par.average(0.9, of="online")
