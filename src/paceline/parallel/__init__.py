"""Data and model parallelism for any `torch.nn.Module`, with the same results as training in one process.

    par = paceline.parallelize(
        model, optimizer, loader, loss=F.cross_entropy, strategy=PipelineParallel(stages=2), microbatches=8
    )
    for epoch in range(3):
        for batch in par.epoch(epoch):
            loss = par.step(batch)          # the same global mean loss on every rank

The package works in a Paceline run, under torchrun, and in a single process. Python imports each public name on first
use, so a script that uses only strategies does not import torch.
"""

from __future__ import annotations

from paceline.system.lazy_import import face

TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.parallel.api import parallelize
    from paceline.parallel.batches.batch import Microbatch, Parts, Whole
    from paceline.parallel.errors import CheckpointError, ParallelError, WorkerError
    from paceline.parallel.large.values import empty, initialise
    from paceline.parallel.strategy import (
        ContextParallel,
        DataParallel,
        ExpertParallel,
        FullyShard,
        Layout,
        PipelineParallel,
        Strategy,
        TensorParallel,
        resolve,
    )
    from paceline.parallel.training import Parallel

_HOMES = {
    "paceline.parallel.api": ("parallelize",),
    "paceline.parallel.batches.batch": ("Microbatch", "Parts", "Whole"),
    "paceline.parallel.errors": ("CheckpointError", "ParallelError", "WorkerError"),
    "paceline.parallel.large.values": ("empty", "initialise"),
    "paceline.parallel.strategy": (
        "ContextParallel",
        "DataParallel",
        "ExpertParallel",
        "FullyShard",
        "Layout",
        "PipelineParallel",
        "Strategy",
        "TensorParallel",
        "resolve",
    ),
    "paceline.parallel.training": ("Parallel",),
}

__all__ = [
    "CheckpointError", "ContextParallel", "DataParallel", "ExpertParallel", "FullyShard", "Layout", "Microbatch",
    "Parallel", "ParallelError", "Parts", "PipelineParallel", "Strategy", "TensorParallel", "Whole", "WorkerError",
    "empty", "initialise", "parallelize", "resolve",
]  # fmt: skip

__getattr__ = face(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
