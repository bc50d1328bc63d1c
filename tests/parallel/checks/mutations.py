"""Omissions have to be noticed: each piece of the data layouts is removed, and equality has to break.

Without these, a test that compares too little would pass for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel import DataParallel, FullyShard, reduce, task
from paceline.parallel.batches import batch
from paceline.parallel.replicas import core, normalization, shard
from tests.parallel.equality import alone, assert_equal, sgd, together
from tests.parallel.models import CASES
from tests.parallel.world import Ranks

SIZES = (2,)

LIMITS = {"loss": 1e-6, "gradient": 1e-6, "parameter": 1e-6, "buffer": 1e-6}


def assert_seen(case: str, strategy: Any, change: Any, rows: tuple[int, ...] = (8, 8, 8), **options: Any) -> None:
    """Fail unless the results are equal without the change and differ with it."""
    one = alone(CASES[case], rows=rows, optimizer=sgd, **options)
    # Turn off the comparison before the first step, because it would detect the change too.
    options["check"] = "off"
    assert_equal(one, together(CASES[case], strategy, rows=rows, optimizer=sgd, **options), **LIMITS)
    with change:
        many = together(CASES[case], strategy, rows=rows, optimizer=sgd, **options)
    # Each rank records its own failure first: a rank that raised here would leave the others waiting in `all_gather_object`.
    failed = False
    try:
        assert_equal(one, many, **LIMITS)
    except AssertionError:
        failed = True
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, failed)
    assert any(everyone), f"{case} on {strategy} is the same without it"


def check_unweighted_microbatch_losses_are_detected(ranks: Ranks) -> None:
    def unweighted(self: task.Task, output: Any, micro: batch.Microbatch) -> Tensor:
        # This is a mean of means: each microbatch counts alike, whatever its number of rows.
        return self.loss(output, micro.target) / (2 * self.microbatches)

    for strategy in (DataParallel(), FullyShard()):
        change = mock.patch.object(task.Task, "weighted_loss", unweighted)
        assert_seen("transformer_tied", strategy, change, microbatches=2)


def check_missing_gradient_sum_over_replicas_is_detected(ranks: Ranks) -> None:
    # Paceline sums the gradients of the first step itself. DDP sums those of later steps.
    change = mock.patch.object(core, "sum_gradients", return_value=None)
    assert_seen("mlp", DataParallel(), change)


def check_mean_instead_of_sum_in_ddp_is_detected(ranks: Ranks) -> None:
    wrap = core._Replicated._wrap

    def without_hook(self: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        with mock.patch.object(DistributedDataParallel, "register_comm_hook", return_value=None):
            ddp = wrap(self)
        self._find_unused = True
        return ddp

    assert_seen("mlp", DataParallel(), mock.patch.object(core._Replicated, "_wrap", without_hook))


def check_mean_instead_of_sum_in_fsdp_is_detected(ranks: Ranks) -> None:
    from torch.distributed.fsdp import FSDPModule

    change = mock.patch.multiple(
        FSDPModule,
        set_gradient_divide_factor=lambda self, factor: None,
        set_force_sum_reduction_for_comms=lambda self, enable: None,
    )
    assert_seen("mlp", FullyShard(), change)


def check_clipping_by_the_norm_of_one_shard_is_detected(ranks: Ranks) -> None:
    def own_norm(self: reduce.Clipper) -> Tensor:
        squares = [reduce.local(p.grad).double().square().sum() for p in self._params.values() if p.grad is not None]
        return torch.stack(squares).sum().sqrt()

    assert_seen("transformer_tied", FullyShard(), mock.patch.object(reduce.Clipper, "norm", own_norm), clip_norm=0.05)


def check_unsynchronized_batch_norm_is_detected(ranks: Ranks) -> None:
    change = mock.patch.object(normalization, "synchronise", return_value=None)
    assert_seen("cnn_batch", DataParallel(), change)


def check_padding_in_batch_norm_statistics_is_detected(ranks: Ranks) -> None:
    @contextlib.contextmanager
    def always(micro: batch.Microbatch) -> Iterator[None]:
        yield

    for strategy in (DataParallel(), FullyShard()):
        assert_seen("cnn_batch", strategy, mock.patch.object(normalization, "counting", always), rows=(1, 3))


def check_splitting_by_replicas_before_microbatches_is_detected(ranks: Ranks) -> None:
    def rows_of_replica_first(rows: int, microbatches: int, replicas: int, replica: int) -> list[range]:
        size = rows // replicas
        own = size // microbatches
        return [range(replica * size + i * own, replica * size + (i + 1) * own) for i in range(microbatches)]

    from paceline.parallel.batches import microbatches as cutting

    change = mock.patch.object(cutting, "own_rows", rows_of_replica_first)
    assert_seen("cnn_batch", DataParallel(), change, microbatches=2)


def check_missing_broadcast_of_initial_parameters_is_detected(ranks: Ranks) -> None:
    from paceline.parallel import initial_broadcast

    case = CASES["mlp"]

    def start() -> nn.Module:
        torch.manual_seed(5 + ranks.rank)
        return case.make().double()

    one = alone(case, rows=(8,))
    assert_equal(one, together(case, DataParallel(), rows=(8,), model=start()), loss=1e-10, gradient=1e-10)
    with mock.patch.object(initial_broadcast, "share", return_value=None):
        many = together(case, DataParallel(), rows=(8,), model=start(), check="off")
    with pytest.raises(AssertionError):
        assert_equal(one, many, loss=1e-6)


def check_gradient_present_on_only_one_rank_is_summed(ranks: Ranks) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    params[0].grad = torch.full((3,), float(ranks.rank + 1))
    if ranks.rank == 1:
        params[1].grad = torch.ones(3)
    params[3].requires_grad_(False)
    summed: Callable[..., None] = reduce.sum_gradients
    summed(params, torch.distributed.group.WORLD, bucket_bytes=16)
    assert params[0].grad.tolist() == [3.0] * 3
    assert params[1].grad is not None
    assert params[1].grad.tolist() == [1.0] * 3
    assert params[2].grad is None
    assert params[3].grad is None


def check_fsdp_shards_have_half_of_the_parameters(ranks: Ranks) -> None:
    model = CASES["transformer_tied"].make()
    from paceline.parallel import mesh, resolve

    world = mesh.build(mesh.start(), resolve(FullyShard(), ranks.size))
    count = sum(param.numel() for param in model.parameters())
    shard.shard_stage(model, world)
    own = sum(reduce.local(param).numel() for param in model.parameters())
    # The tolerance is for parameters with an odd first dimension, such as the embedding of 17 tokens: FSDP can't halve them.
    assert count / 2 <= own + 40
    assert own <= count / 2 + 40
