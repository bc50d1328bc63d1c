"""Replicas and shards equal one process: losses, gradients, parameters and buffers."""

from __future__ import annotations

from typing import Any

import torch

from paceline.parallel import DataParallel, FullyShard, TensorParallel
from tests.parallel.equality import alone, assert_equal, sgd, together
from tests.parallel.models import RISKIEST, SHALLOW, on
from tests.parallel.world import Ranks

SIZES = (2, 4)

# In float64 only the order of sums makes a difference. AdamW divides gradients by their own size, so the rounding error of a zero
# gradient becomes a whole step. Therefore parameters may differ by 1e-10 after five steps.
EXACT = {"loss": 1e-11, "gradient": 1e-10, "parameter": 1e-10, "buffer": 1e-11}


def strategies(size: int) -> list[object]:
    both = [DataParallel(2) @ FullyShard(2)] if size == 4 else []
    return [DataParallel(), FullyShard(), *both]


def check_data_parallel_training_of_every_model_equals_one_process(ranks: Ranks) -> None:
    # Four workers also test uneven batches and clipping. In a batch of 2 rows, two of the four replicas compute
    # padding.
    options: dict[str, Any] = {} if ranks.size == 2 else {"rows": (7, 2, 6), "clip_norm": 0.05}
    with_all = RISKIEST if ranks.size == 2 else ("transformer_tied",)
    cases = on(ranks.size, SHALLOW)
    if ranks.size == 4:
        # With four workers, `make test` uses only some models: skipped layers make no difference to replicas, whatever
        # their number.
        cases = ranks.cells([case for case in cases if case.name in RISKIEST], cases)
    for case, layouts in ranks.grid(cases, strategies(ranks.size), with_all=with_all):
        own = {"rows": (8,) * 5} | options if case.name in RISKIEST else options
        one = alone(case, **own)
        check = "first" if ranks.size == 2 and case.name in RISKIEST else "off"
        for strategy in layouts:
            assert_equal(one, together(case, strategy, check=check, **own), **EXACT)


def check_microbatches_equal_gradient_accumulation(ranks: Ranks) -> None:
    for name, several in ranks.cells(
        {"cnn_batch": (4,), "transformer_tied": (3,)}, dict.fromkeys(("cnn_batch", "transformer_tied"), (2, 3, 4))
    ).items():
        for microbatches in several:
            one = alone(SHALLOW[name], microbatches=microbatches, rows=(12, 12))
            for strategy in strategies(ranks.size):
                assert_equal(one, together(SHALLOW[name], strategy, microbatches=microbatches, rows=(12, 12)), **EXACT)


def check_batches_not_divisible_by_the_replicas_equal_one_process(ranks: Ranks) -> None:
    rows = (7, 2, 5)
    for name, several in ranks.cells(
        {"cnn_batch": (1,), "transformer_tied": (2,)}, dict.fromkeys(("mlp", "cnn_batch", "transformer_tied"), (1, 2))
    ).items():
        for microbatches in several:
            one = alone(SHALLOW[name], microbatches=microbatches, rows=rows)
            for strategy in strategies(ranks.size):
                assert_equal(one, together(SHALLOW[name], strategy, microbatches=microbatches, rows=rows), **EXACT)


def check_batch_of_one_row_equals_one_process(ranks: Ranks) -> None:
    one = alone(SHALLOW["transformer_untied"], rows=(4, 1, 4))
    for strategy in strategies(ranks.size):
        assert_equal(one, together(SHALLOW["transformer_untied"], strategy, rows=(4, 1, 4)), **EXACT)


def check_float32_data_parallel_training_stays_close_to_one_process(ranks: Ranks) -> None:
    cases = on(ranks.size, SHALLOW)
    for case in ranks.cells([case for case in cases if case.name in RISKIEST], cases):
        one = alone(case, dtype=torch.float32, rows=(8,), optimizer=sgd)
        for strategy in strategies(ranks.size):
            options = {"dtype": torch.float32, "rows": (8,), "optimizer": sgd}
            many = together(case, strategy, check="first" if ranks.size == 2 else "off", **options)
            assert_equal(one, many, loss=5e-6, gradient=5e-6, parameter=5e-6, buffer=5e-6)


def check_gradients_are_clipped_by_the_norm_of_the_whole_model(ranks: Ranks) -> None:
    # The combined layout splits some parameters along two axes and others along one axis. The norm must include all of
    # them.
    more = [FullyShard(2) @ TensorParallel(2)] if ranks.size == 4 else []
    for name in ("transformer_tied",):
        one = alone(SHALLOW[name], clip_norm=0.05)
        for strategy in [*strategies(ranks.size), *more]:
            assert_equal(one, together(SHALLOW[name], strategy, clip_norm=0.05), **EXACT)
