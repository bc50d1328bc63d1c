"""What is left out of the layouts that cut a model has to be seen, too; see `mutations`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, PipelineParallel, TensorParallel, training
from paceline.parallel.pipeline.programs import Programs
from paceline.parallel.pipeline.ties import StageTies
from paceline.parallel.reduce import local
from paceline.parallel.tensor import cutting
from tests.parallel.checks.mutations import LIMITS, assert_seen
from tests.parallel.equality import alone, assert_equal, batches, sgd, together
from tests.parallel.models import CASES, Mlp, Transformer
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


def check_an_attribute_that_the_loop_changes_is_followed(ranks: Ranks) -> None:
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


def check_the_copies_of_a_tie_have_one_gradient(ranks: Ranks) -> None:
    change = mock.patch.object(StageTies, "sum_gradients", return_value=None)
    assert_seen("transformer_tied", PipelineParallel(), change, microbatches=2)


def check_a_part_with_another_number(ranks: Ranks) -> None:
    cut = cutting.cut

    def off(model: nn.Module, *args: Any, **options: Any) -> None:
        cut(model, *args, **options)
        if ranks.rank == 1:
            part = next(param for param in model.parameters() if cutting.is_cut(param))
            with torch.no_grad():
                local(part).mul_(1.001)

    change = mock.patch.object(cutting, "cut", off)
    case = CASES["transformer_untied"]
    with change, pytest.raises(ParallelError, match="is not the plain one"):
        together(case, TensorParallel(), rows=(8,), optimizer=sgd)
    one = alone(case, rows=(8,), optimizer=sgd)
    with change, mock.patch.object(cutting, "verify", return_value=None):
        many = together(case, TensorParallel(), rows=(8,), optimizer=sgd)
    with pytest.raises(AssertionError):
        assert_equal(one, many, loss=LIMITS["loss"])


def check_a_tensor_group_draws_the_same_numbers(ranks: Ranks) -> None:
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
