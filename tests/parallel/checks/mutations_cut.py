"""Omissions in the layouts that cut a model have to be noticed, too; see `mutations`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
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
    deterministic_rng,
    experts,
    training,
)
from paceline.parallel.context import Places
from paceline.parallel.full_tensor import is_part
from paceline.parallel.pipeline.programs import Programs
from paceline.parallel.reduce import local
from paceline.parallel.replicas import core
from paceline.parallel.tensor import cutting, layers
from paceline.parallel.tensor.check import Reference
from paceline.parallel.tied_parameters import StageTies
from tests.parallel.checks.experts import MIXED
from tests.parallel.checks.mutations import LIMITS, assert_seen
from tests.parallel.equality import alone, assert_equal, batches, sgd, together
from tests.parallel.models import CASES, SHALLOW, Case, Mlp, Transformer, token_loss
from tests.parallel.tensor.models import WORDS, Fused, Tokens
from tests.parallel.world import Ranks

SIZES = (2,)


class Scaled(Mlp):
    """Reads what the loop sets."""

    alpha = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.alpha


def _losses(strategy: Any, change: Any) -> list[float]:
    torch.manual_seed(5)
    model = Scaled().double()
    given = batches(CASES["mlp"], torch.float64, (8,) * 3)
    par = paceline.parallelize(
        model, sgd(model), given, loss=CASES["mlp"].loss, strategy=strategy, microbatches=2, check="off"
    )
    losses = []
    with change:
        for number, batch in enumerate(given):
            model.alpha = 1.0 + number
            losses.append(float(par.step(batch)))
    return losses


def check_attribute_changed_by_the_loop_applies_and_a_stale_one_is_detected(ranks: Ranks) -> None:
    torch.manual_seed(5)
    plain = Scaled().double()
    optimizer = sgd(plain)
    one = []
    for number, (x, y) in enumerate(batches(CASES["mlp"], torch.float64, (8,) * 3)):
        plain.alpha = 1.0 + number
        optimizer.zero_grad()
        loss = CASES["mlp"].loss(plain(x), y)
        loss.backward()
        optimizer.step()
        one.append(float(loss.detach()))
    same = mock.patch.object(Programs, "no_such_name", None, create=True)
    for strategy in (DataParallel(), FullyShard(), PipelineParallel(), TensorParallel()):
        assert _losses(strategy, same) == pytest.approx(one, abs=1e-12)
    stale = mock.patch.object(Programs, "refresh", return_value=None)
    assert abs(_losses(PipelineParallel(), stale)[-1] - one[-1]) > 1e-3


def check_missing_gradient_sum_over_tied_weights_is_detected(ranks: Ranks) -> None:
    change = mock.patch.object(StageTies, "sum_gradients", return_value=None)
    assert_seen("transformer_tied", PipelineParallel(), change, microbatches=2)


def check_changed_value_in_a_tensor_shard_is_detected(ranks: Ranks) -> None:
    cut = cutting.cut

    def off(model: nn.Module, *args: Any, **options: Any) -> None:
        cut(model, *args, **options)
        if ranks.rank == 1:
            part = next(param for param in model.parameters() if is_part(param))
            with torch.no_grad():
                local(part).mul_(1.001)

    change = mock.patch.object(cutting, "cut", off)
    case = CASES["transformer_untied"]
    with change, pytest.raises(ParallelError, match="is not the plain one"):
        together(case, TensorParallel(), rows=(8,), optimizer=sgd)
    one = alone(case, rows=(8,), optimizer=sgd)
    with change, mock.patch.object(Reference, "verify", return_value=None):
        many = together(case, TensorParallel(), rows=(8,), optimizer=sgd)
    with pytest.raises(AssertionError):
        assert_equal(one, many, loss=LIMITS["loss"])


def check_different_dropout_within_a_tensor_group_is_detected(ranks: Ranks) -> None:
    def uncut(streams: Any) -> bool:
        """Whether what no rank has cut is the same on both after a step with dropout."""
        torch.manual_seed(5)
        model = Transformer(tied=False, depth=2, dropout=0.5).double()
        case = CASES["transformer_untied"]
        given = batches(case, torch.float64, (8,))
        with mock.patch.object(training, "Streams", streams):
            par = paceline.parallelize(model, sgd(model), given, loss=case.loss, strategy=TensorParallel(), check="off")
            par.step(given[0])
        own = par.executor.named_parameters()["norm.weight"].detach().clone()
        others = own.clone()
        torch.distributed.broadcast(others, 0)
        same = torch.tensor(float(torch.equal(own, others)))
        torch.distributed.all_reduce(same, torch.distributed.ReduceOp.MIN)
        return bool(same)

    streams = training.Streams
    assert uncut(streams)
    assert not uncut(lambda **options: streams(**(options | {"replica": ranks.rank})))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + torch.rand_like(x))


class Changed(nn.Module):
    """Reads what the loop sets, and draws numbers if it is to."""

    alpha = 1.0

    def __init__(self, case: Case, noise: bool) -> None:
        super().__init__()
        self.inner, self.noise = case.make(), Noise() if noise else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(self.inner(x)) * self.alpha


#: (strategy, name of a model in `MODELS` that the strategy can divide over ranks)
EVERY = (
    (DataParallel(), "transformer_untied"),
    (FullyShard(), "transformer_untied"),
    (PipelineParallel(), "transformer_untied"),
    (TensorParallel(), "transformer_untied"),
    (ContextParallel(), "transformer_untied"),
    (ExpertParallel(), "mixed"),
)
MODELS = {"transformer_untied": SHALLOW["transformer_untied"], "mixed": MIXED}


def _changed(name: str, strategy: Any, *, noise: bool = False, stale: bool = False, check: str = "off") -> list[float]:
    case = MODELS[name]
    torch.manual_seed(5)
    model = Changed(case, noise).double()
    # A changed attribute `alpha` shows only in the second step. Different random numbers show in the first step.
    given = batches(case, torch.float64, (8,) if noise else (8, 8))
    options = {"loss": case.loss, "microbatches": 2, "check": check}
    par = paceline.parallelize(model, sgd(model), given, strategy=strategy, **options)
    step = par.executor.train_step

    def with_first(micros: Any) -> Tensor:
        model.alpha = 1.0
        return step(micros)

    if stale:
        par.executor.train_step = with_first  # type: ignore[method-assign]
    losses = []
    for number, batch in enumerate(given):
        model.alpha = 1.0 + number
        losses.append(float(par.step(batch)))
    return losses


def check_stale_attribute_is_detected_in_each_strategy(ranks: Ranks) -> None:
    for name, case in MODELS.items():
        torch.manual_seed(5)
        model = Changed(case, noise=False).double()
        optimizer, one = sgd(model), []
        for number, (x, y) in enumerate(batches(case, torch.float64, (8, 8))):
            model.alpha = 1.0 + number
            optimizer.zero_grad()
            loss = case.loss(model(x), y)
            loss.backward()
            optimizer.step()
            one.append(float(loss.detach()))
        for strategy in (own for own, of in EVERY if of == name):
            assert _changed(name, strategy) == pytest.approx(one, abs=1e-12), strategy
            assert abs(_changed(name, strategy, stale=True)[-1] - one[-1]) > 1e-3, strategy


def check_different_random_number_on_one_rank_is_detected_in_each_strategy(ranks: Ranks) -> None:
    """In the comparison before the first step all draw the same; one rank draws another here."""
    other = deterministic_rng._like(0.25 if ranks.rank else 0.5)
    # `make test` leaves out FullyShard, because random numbers do not depend on whether replicas are sharded.
    for strategy, name in ranks.cells(EVERY[:1] + EVERY[2:], EVERY):
        _changed(name, strategy, noise=True, check="first")
        change = mock.patch.dict(deterministic_rng._FIXED, {"aten.rand_like": other})
        # TensorParallel also draws random numbers when it tries its plan, so it notices the different number before the
        # comparison.
        with change, pytest.raises(ParallelError, match=r"before the first step|is not the plain one: the gradient of"):
            _changed(name, strategy, noise=True, check="first")


def check_omitted_steps_of_context_parallelism_are_detected(ranks: Ranks) -> None:
    def own_alone(self: Places, whole: Tensor, dim: int) -> Tensor:
        return self.take(whole, dim)

    strategy = ContextParallel()
    assert_seen("transformer_tied", strategy, mock.patch.object(Places, "scatter_sum", own_alone))
    assert_seen("transformer_tied", strategy, mock.patch.object(core, "sum_gradients", return_value=None))
    places = Places.take
    shifted = mock.patch.object(Places, "take", lambda self, x, dim: places(self, x.roll(1, dim), dim))
    assert_seen("transformer_tied", strategy, shifted)


def check_omitted_steps_of_expert_parallelism_are_detected(ranks: Ranks) -> None:
    strategy, mixed = ExpertParallel(), {"mixed": MIXED}
    with mock.patch.dict(CASES, mixed):
        copy = mock.patch.object(experts._Copy, "backward", staticmethod(lambda ctx, *grads: (None, *grads)))
        assert_seen("mixed", strategy, copy)
        assert_seen("mixed", strategy, mock.patch.object(core, "sum_gradients", return_value=None))
        once_more = mock.patch.object(experts._Shared, "backward", staticmethod(lambda ctx, grad: (grad, None)))
        assert_seen("mixed", strategy, once_more)


def check_missing_exchange_of_fused_projection_shards_is_detected(ranks: Ranks) -> None:
    def trained() -> None:
        torch.manual_seed(5)
        model = Tokens(Fused()).double()
        given = [(torch.randint(0, WORDS, (4, 8)), torch.randint(0, WORDS, (4, 8)))]
        paceline.parallelize(model, sgd(model), given, loss=token_loss, strategy=TensorParallel())

    trained()
    change = mock.patch.object(layers, "_exchanged", lambda own, *how, **back: own)
    with change, pytest.raises(ParallelError, match="is not the plain one"):
        trained()
