"""A model that a layout can't train is refused by name before the first step; others are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, PipelineParallel, TensorParallel
from tests.parallel.equality import alone, assert_equal, sgd, together
from tests.parallel.models import Case, plain_tokens, token_loss, vectors
from tests.parallel.pipelines import EXACT
from tests.parallel.world import Ranks

SIZES = (2,)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, 8, sparse=True)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.rows(tokens)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(h)


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(12, 12, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.by.dtype) @ self.by).abs()


class Mixed(Turn):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.ModuleList([Turn() for _ in range(2)])
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for turn in self.turned:
            x = turn(x)
        return self.head(x)


class Between(nn.Module):
    """Layers that TensorParallel cuts, and complex ones, in numbers, outputs and gradients."""

    def __init__(self, *, as_real: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, 5)
        by = torch.randn(12, 12, dtype=torch.complex64)
        self.by = nn.Parameter(torch.view_as_real(by) if as_real else by)
        self.turn = Product()

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.down(torch.relu(self.up(x)))
        by = self.by if self.by.is_complex() else torch.view_as_complex(self.by)
        return self.head(self.turn(h, by).abs())


class Product(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return x.to(by.dtype) @ by


class Remembers(nn.Module):
    """Keeps a tensor with its graph, which can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 5)
        self.penalty: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        self.penalty = (h**2).mean()
        return self.down(h)


SPARSE = Case(name="sparse", make=Lookup, batch=plain_tokens, loss=token_loss)


def spread(
    model: nn.Module,
    strategy: Any,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
) -> Any:
    torch.manual_seed(2)
    given = [vectors(8)] * 2
    return paceline.parallelize(model, optimizer(model), given, loss=loss, strategy=strategy, microbatches=2)


def check_sparse_gradients_are_refused_except_in_a_pipeline(ranks: Ranks) -> None:
    """Regression: DataParallel, FullyShard and TensorParallel failed with errors of torch. PipelineParallel failed if
    the first step was compared."""
    one = alone(SPARSE, microbatches=4, rows=(8, 8), optimizer=sgd)
    many = together(SPARSE, PipelineParallel(), microbatches=4, rows=(8, 8), optimizer=sgd, check="first")
    for found in (one, many):
        found.gradients = {name: grad.to_dense() for name, grad in found.gradients.items()}
    assert_equal(one, many, **EXACT)
    for strategy in (DataParallel(), FullyShard(), TensorParallel()):
        with pytest.raises(ParallelError, match=r"rows has sparse gradients .*sparse=False, or use PipelineParallel"):
            together(SPARSE, strategy, rows=(8,), optimizer=sgd)


def check_complex_parameters_are_trained_or_refused_by_strategy(ranks: Ranks) -> None:
    """Regression: DataParallel reported complex parameters as unused, and the check of the first step compared only
    their real parts."""
    for strategy in (FullyShard(), PipelineParallel()):
        torch.manual_seed(3)
        model, plain = Turned(), Turned()
        plain.load_state_dict(model.state_dict())
        par = spread(model, strategy)
        x, y = vectors(8)
        loss = F.cross_entropy(plain(x), y)
        assert abs(float(par.step((x, y))) - float(loss.detach())) < 1e-5
        loss.backward()
        sgd(plain).step()
        after = par.full_state_dict()
        assert all(torch.allclose(value, after[name], atol=1e-5) for name, value in plain.state_dict().items())
        assert "complex" not in par.explain()
    # Regression: for a complex layer, DataParallel's error suggested TensorParallel, which failed with "aminmax not
    # implemented for ComplexDouble".
    for strategy, as_real in ((TensorParallel(), False), (DataParallel(), True)):
        torch.manual_seed(3)
        cut, plain_cut = Between(as_real=as_real), Between(as_real=as_real)
        plain_cut.load_state_dict(cut.state_dict())
        par = spread(cut, strategy)
        loss = F.cross_entropy(plain_cut(x), y)
        assert abs(float(par.step((x, y))) - float(loss.detach())) < 1e-5
        loss.backward()
        sgd(plain_cut).step()
        after = par.full_state_dict()
        assert all(torch.allclose(value, after[name], atol=1e-5) for name, value in plain_cut.state_dict().items())
    with pytest.raises(ParallelError, match=r"turned\.0\.by is complex, .*view_as_complex.*FullyShard"):
        spread(Turned(), DataParallel())
    with pytest.raises(ParallelError, match=r"several types: by is torch\.complex64, head\.weight is torch\.float32"):
        spread(Mixed(), FullyShard())


def check_adafactor_is_refused_if_parameters_are_sharded(ranks: Ranks) -> None:
    def adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.1)

    for strategy in (FullyShard(), TensorParallel()):
        with pytest.raises(ParallelError, match="Adafactor looks at whole matrices"):
            spread(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5)), strategy, optimizer=adafactor)
    par = spread(nn.Linear(12, 5), DataParallel(), optimizer=adafactor)
    par.step(vectors(8))


def check_model_that_cannot_be_deepcopied_is_split(ranks: Ranks) -> None:
    """Regression: the copy failed with "Only Tensors created explicitly by the user support the deepcopy protocol". In
    a later version, Paceline refused the model."""
    torch.manual_seed(1)
    model, plain = Remembers(), Remembers()
    plain.load_state_dict(model.state_dict())
    model(vectors(2)[0])
    par, batch = spread(model, TensorParallel()), vectors(8)
    assert "colwise: up" in par.explain()
    loss = F.cross_entropy(plain(batch[0]), batch[1])
    assert abs(float(par.step(batch)) - float(loss.detach())) < 1e-6
    loss.backward()
    sgd(plain).step()
    after = par.full_state_dict()
    assert all(torch.allclose(value, after[name], atol=1e-6) for name, value in plain.state_dict().items())


def check_loss_that_reads_a_parameter_is_trained_without_first_step_comparison(ranks: Ranks) -> None:
    """Regression: the check of the first step compares the model with a copy. The loss gives a gradient to the model's
    own parameter but not to the copy's, so the training was refused."""
    torch.manual_seed(1)
    model, plain = nn.Linear(12, 5), nn.Linear(12, 5)
    plain.load_state_dict(model.state_dict())

    def loss_with(weight: Tensor) -> Callable[[Any, Any], Tensor]:
        return lambda output, target: F.cross_entropy(output, target) + 0.1 * (weight**2).sum()

    par = spread(model, DataParallel(), loss=loss_with(model.weight))
    optimizer = sgd(plain)
    for _ in range(2):
        batch = vectors(8)
        loss = loss_with(plain.weight)(plain(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(float(par.step(batch)) - float(loss.detach())) < 1e-6
    assert torch.allclose(model.weight, plain.weight, atol=1e-6)
    assert "the loss reads weight of the model itself" in par.explain()
    with pytest.raises(ParallelError, match="the loss reads weight of the model itself"):
        par.check(vectors(8))


class Joined(nn.Module):
    """The generator's step: what the discriminator says of it. Or a critic on what an actor has in common with it."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def _pair(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    shared, other = nn.Linear(12, 12), nn.Linear(12, 12)
    shared.weight.requires_grad_(True)
    if kind == "gan":
        # The second model trains the shared module. The first model only uses it and passes gradients through.
        return Joined(other, Joined(shared, nn.Linear(12, 5))), Joined(shared, nn.Linear(12, 5))
    return Joined(shared, nn.Linear(12, 5)), Joined(shared, nn.Linear(12, 5))


def check_module_shared_by_two_trainings_is_trained_unsharded_or_refused(ranks: Ranks) -> None:
    """Regression: for a module in two trainings, FullyShard crashed inside Gloo, TensorParallel hung, and
    PipelineParallel's error gave a wrong reason."""
    batches = [vectors(8), vectors(8)]
    for kind in ("gan", "actor and critic"):
        plain, models = _pair(kind), _pair(kind)
        alone_by = [sgd(model) for model in plain]
        pars = [spread(model, DataParallel()) for model in models]
        for batch in batches:
            for model, optimizer, par in zip(plain, alone_by, pars, strict=True):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch[0]), batch[1])
                loss.backward()
                optimizer.step()
                assert abs(float(par.step(batch)) - float(loss.detach())) < 1e-5
        for model, par in zip(plain, pars, strict=True):
            after = par.full_state_dict()
            assert all(torch.allclose(value, after[name], atol=1e-5) for name, value in model.state_dict().items())
        for strategy in (FullyShard(), PipelineParallel(), TensorParallel()):
            for first, second in ((strategy, strategy), (DataParallel(), strategy), (strategy, DataParallel())):
                one, other = _pair(kind)
                par = spread(one, first)
                with pytest.raises(ParallelError, match=r"is part of a model that parallelize has taken over already"):
                    spread(other, second)
                # After the second model was refused, the first model can still be trained.
                par.step(batches[0])
