"""A model without values is cut first and filled then: equal to one process, from its constructor and from safetensors.

And blocks that are computed again in the backward pass, and batches in several parts, which equal one process as well.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import paceline
from paceline.parallel import (
    DataParallel,
    FullyShard,
    ParallelError,
    PipelineParallel,
    TensorParallel,
    empty,
    initialise,
)
from paceline.parallel.large.meta_parameters import region_of
from paceline.parallel.large.safetensors import Folder
from tests.parallel.equality import Outcome, adamw, alone, assert_equal, batches, read, sgd, together
from tests.parallel.models import CASES, SHALLOW, Case, vectors
from tests.parallel.pipelines import EXACT
from tests.parallel.world import Ranks

SIZES = (2, 4)


def hollow(case: Case) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    try:
        with empty():
            return case.make()
    finally:
        torch.set_default_dtype(before)


def layouts(size: int) -> list[tuple[object, int]]:
    """Strategy and microbatches."""
    if size == 2:
        return [(DataParallel(), 1), (FullyShard(), 1), (PipelineParallel(), 2), (TensorParallel(), 1)]
    return [(FullyShard(2) @ PipelineParallel(2), 2), (FullyShard(2) @ TensorParallel(2), 1)]


def check_model_built_empty_equals_one_process_after_initialization_or_loading(ranks: Ranks) -> None:
    case = SHALLOW["transformer_tied"]
    given = batches(case, torch.float64, (8, 8))
    plain = {}
    every = layouts(ranks.size)
    # `make test` leaves out plain replicas, because each of them holds the whole model. Two workers test shards and
    # stages, and four workers test combinations of two strategies.
    for strategy, microbatches in ranks.cells(every[1:], every):
        model = hollow(case)
        assert all(param.is_meta for param in model.parameters())
        par = paceline.parallelize(
            model,
            adamw(model),
            given,
            loss=case.loss,
            loss_weight=case.loss_weight,
            strategy=strategy,
            microbatches=microbatches,
            seed=7,
        )
        reference = initialise(hollow(case), 7)
        # The values must be equal, not just equal within rounding errors.
        expected = reference.state_dict()
        for name, value in par.full_state_dict().items():
            assert torch.equal(value, expected[name]), (strategy, name)
        outcome = Outcome()
        for batch in given:
            outcome.losses.append(float(par.step(batch)))
        read(par, outcome)
        if microbatches not in plain:
            plain[microbatches] = alone(case, model=initialise(hollow(case), 7), rows=(8, 8), microbatches=microbatches)
        assert_equal(plain[microbatches], outcome, **EXACT)
        assert "equal to the plain model" in par.compared
        folder = ranks.folder / str(strategy)
        par.save_safetensors(folder)
        saved = par.full_state_dict()
        _check_folder(folder, saved, ranks)
        model = hollow(case)
        again = paceline.parallelize(
            model,
            adamw(model),
            given,
            loss=case.loss,
            loss_weight=case.loss_weight,
            strategy=strategy,
            microbatches=microbatches,
            weights=folder,
            check="off",
        )
        for name, value in again.full_state_dict().items():
            assert torch.equal(value, saved[name]), (strategy, name)
        with pytest.raises(ParallelError, match="is there and is not a checkpoint"):
            par.save_safetensors(folder)


def _check_folder(folder: Path, values: dict[str, Tensor], ranks: Ranks) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    # Each worker has written one file, and no tensor is stored twice.
    assert len(files) == ranks.size
    assert sorted(set(index["weight_map"].values())) == files
    assert set(values) - set(index["weight_map"]) == {"head.weight"}
    stored = Folder(folder)
    for name in index["weight_map"]:
        assert torch.equal(stored.read(name), values[name])
    # The folder contains no leftover files and no lock.
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, "model.safetensors.index.json"])


def check_each_rank_reads_only_its_own_part_of_safetensors(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    from paceline.parallel.large import values as module

    case = CASES["transformer_untied"]
    source = initialise(hollow(case), 1)
    given = batches(case, torch.float64, (8,))
    folders: list[Folder] = []

    class Noted(Folder):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            folders.append(self)

    first = paceline.parallelize(source, adamw(source), given, loss=case.loss, strategy=DataParallel())
    first.save_safetensors(ranks.folder / "weights")
    module.Folder = Noted
    try:
        for strategy, microbatches in layouts(2)[1:]:
            model = hollow(case)
            par = paceline.parallelize(
                model,
                adamw(model),
                given,
                loss=case.loss,
                strategy=strategy,
                microbatches=microbatches,
                weights=ranks.folder / "weights",
                check="off",
            )
            own = 0
            for param in par.executor.named_parameters().values():
                count = param.element_size()
                for start, end in region_of(param):
                    count *= end - start
                own += count
            whole = sum(value.nbytes for value in source.state_dict().values())
            assert folders[-1].bytes_read == own, strategy
            # A pipeline is cut by the measured times of its blocks, so a single worker may hold more than the average.
            parts: list[int] = [0] * ranks.size
            dist.all_gather_object(parts, own)
            assert sum(parts) < 0.7 * ranks.size * whole, strategy
            assert max(parts) < whole, strategy
    finally:
        module.Folder = Folder


def check_activation_recomputation_equals_one_process(ranks: Ranks) -> None:
    every = [strategy for strategy, _ in layouts(ranks.size)]
    whole = [(SHALLOW["transformer_tied"], every), (CASES["cnn_batch"], every)]
    # `make test` uses some layouts for each model. Two workers test batch statistics with replicas and stages, and
    # transformer blocks that are sharded or split. Four workers test split layers.
    if ranks.size == 2:
        covering = [(SHALLOW["transformer_tied"], every[1::2]), (CASES["cnn_batch"], every[::2])]
    else:
        covering = [(SHALLOW["transformer_tied"], every[1:])]
    for case, several in ranks.cells(covering, whole):
        expected = alone(case, microbatches=4, rows=(8, 9))
        for strategy in several:
            if case.name == "cnn_batch" and "TensorParallel" in str(strategy):
                continue
            options = {"microbatches": 2, "accumulate": 2, "recompute": "blocks", "rows": (8, 9)}
            options["check"] = "first" if ranks.size == 2 and case.name == "transformer_tied" else "off"
            many = together(case, strategy, **options)
            limits = EXACT | {"parameter": 1e-9}
            assert_equal(expected, many, **limits)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def check_recomputed_block_draws_the_same_dropout(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    case = Case(name="dropping", make=Dropping, batch=vectors)
    for strategy in (DataParallel(), FullyShard(), PipelineParallel(cut=["blocks.2"])):
        outcomes = [
            together(case, strategy, rows=(8, 8), microbatches=2, optimizer=sgd, recompute=again)
            for again in (None, ["blocks.*"])
        ]
        one, many = outcomes
        assert one.losses == many.losses
        assert many.gradients.keys() == one.gradients.keys()
        for name, gradient in many.gradients.items():
            assert torch.allclose(gradient, one.gradients[name], rtol=0.0, atol=1e-12), (strategy, name)
