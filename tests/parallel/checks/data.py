"""Replicas and shards equal one process: losses, gradients, parameters and buffers."""

from __future__ import annotations

import torch

from paceline.parallel import DataParallel, FullyShard, TensorParallel
from tests.parallel.equality import alone, assert_equal, sgd, together
from tests.parallel.models import CASES, on
from tests.parallel.world import Ranks

SIZES = (2, 4)

# float64: what is left is the order of sums. AdamW divides gradients by their own size, which turns the rounding of one
# that is 0 in truth into a step: hence five steps within 1e-10, and single gradients closer.
EXACT = {"loss": 1e-11, "gradient": 1e-10, "parameter": 1e-10, "buffer": 1e-11}


def strategies(size: int) -> list[object]:
    both = [DataParallel(2) @ FullyShard(2)] if size == 4 else []
    return [DataParallel(), FullyShard(), *both]


def check_every_model_ends_as_in_one_process(ranks: Ranks) -> None:
    for case in on(ranks.size):
        one = alone(case)
        for strategy in strategies(ranks.size):
            assert_equal(one, together(case, strategy, check="first"), **EXACT)


def check_microbatches_equal_accumulation(ranks: Ranks) -> None:
    for name in ("cnn_batch", "transformer_tied"):
        for microbatches in (2, 3, 4) if ranks.size == 2 else (3,):
            one = alone(CASES[name], microbatches=microbatches, rows=(12, 12))
            for strategy in strategies(ranks.size):
                assert_equal(one, together(CASES[name], strategy, microbatches=microbatches, rows=(12, 12)), **EXACT)


def check_batches_that_do_not_divide(ranks: Ranks) -> None:
    # 2 rows over 4 replicas: half of them compute padding.
    rows = (7, 5, 3, 2, 6)
    for name in ("mlp", "cnn_batch", "transformer_tied") if ranks.size == 2 else ("cnn_batch",):
        for microbatches in (1, 2) if ranks.size == 2 else (1,):
            one = alone(CASES[name], microbatches=microbatches, rows=rows)
            for strategy in strategies(ranks.size):
                assert_equal(one, together(CASES[name], strategy, microbatches=microbatches, rows=rows), **EXACT)


def check_a_batch_of_one_row(ranks: Ranks) -> None:
    one = alone(CASES["transformer_untied"], rows=(4, 1, 4))
    for strategy in strategies(ranks.size):
        assert_equal(one, together(CASES["transformer_untied"], strategy, rows=(4, 1, 4)), **EXACT)


def check_single_precision_stays_close(ranks: Ranks) -> None:
    for case in on(ranks.size):
        one = alone(case, dtype=torch.float32, rows=(8,), optimizer=sgd)
        for strategy in strategies(ranks.size):
            options = {"dtype": torch.float32, "rows": (8,), "optimizer": sgd}
            many = together(case, strategy, check="first" if ranks.size == 2 else "off", **options)
            assert_equal(one, many, loss=5e-6, gradient=5e-6, parameter=5e-6, buffer=5e-6)


def check_clipping_is_by_the_norm_of_the_whole(ranks: Ranks) -> None:
    # Of parameters that are cut along two axes too, next to some that are cut along one.
    more = [FullyShard(2) @ TensorParallel(2)] if ranks.size == 4 else []
    for name in ("transformer_tied",):
        one = alone(CASES[name], clip_norm=0.05)
        for strategy in [*strategies(ranks.size), *more]:
            assert_equal(one, together(CASES[name], strategy, clip_norm=0.05), **EXACT)
