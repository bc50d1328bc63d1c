"""What the checks of pipelines share. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, PipelineParallel
from tests.parallel.equality import batches, sgd
from tests.parallel.models import Case
from tests.parallel.world import Ranks

# The largest allowed differences. In float64 only the order of sums differs, but AdamW divides by the size of a
# gradient, which enlarges rounding errors.
EXACT = {"loss": 1e-11, "gradient": 1e-10, "parameter": 1e-10, "buffer": 1e-11}


def pipelines(size: int) -> list[object]:
    return [
        PipelineParallel(size),
        PipelineParallel(size, schedule="gpipe"),
        PipelineParallel(size, schedule="interleaved"),
    ]


def combined(size: int) -> list[object]:
    return [DataParallel(2) @ PipelineParallel(2), FullyShard(2) @ PipelineParallel(2)] if size == 4 else []


def fits(case: Case, strategy: object, size: int) -> bool:
    """Whether the model has as many blocks as the strategy has stages."""
    stages = 2 * size if getattr(strategy, "schedule", "") == "interleaved" else size
    return stages <= 5 or case.name.startswith(("transformer", "cnn"))


def parallel(model: nn.Module, strategy: object, case: Case, given: Any = None, **options: Any) -> Any:
    """The model, spread; with SGD, four microbatches and no comparison unless said otherwise."""
    settings: dict[str, Any] = {"loss": case.loss, "loss_weight": case.loss_weight, "microbatches": 4, "check": "off"}
    settings |= options
    sample = batches(case, next(model.parameters()).dtype, (8,)) if given is None else given
    return paceline.parallelize(model, sgd(model), sample, strategy=strategy, **settings)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def assert_refused(action: Callable[[], object], *words: str) -> None:
    """The same ParallelError on every rank, with these words."""
    with pytest.raises(ParallelError) as caught:
        action()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def assert_different(ranks: Ranks, action: Callable[[], object]) -> None:
    """Fail unless at least one rank finds a difference: the comparison notices the omission."""
    found = torch.zeros(())
    try:
        action()
    except AssertionError:
        found += 1
    torch.distributed.all_reduce(found)
    assert found > 0, "what was left out made no difference"
