"""Refuses what a layout can't train, by its name and before the first step. Loaded on use: imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.parallel.errors import ParallelError

if TYPE_CHECKING:
    from paceline.parallel.strategy import Layout

#: They update a parameter by norms of its rows and columns in place, which torch's DTensor has no rule for.
_WHOLE_MATRICES = ("Adafactor",)


def check_fits(model: nn.Module, optimizer: torch.optim.Optimizer | None, layout: Layout) -> None:
    """Nothing where the layout can train this model with this optimizer.

    Raises:
        ParallelError: it can't, where torch would fail in the middle of a step with words of its own.
    """
    if layout.replicas > 1 or layout.tensor > 1:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
                raise ParallelError(
                    f"{name or 'the model'} has sparse gradients (sparse=True), which {layout} does not exchange. Make it "
                    "with sparse=False, or use PipelineParallel() alone."
                )
    if layout.replicas > 1 and layout.shard == 1 and layout.pipe == 1:
        for name, param in model.named_parameters():
            if param.is_complex() and param.requires_grad:
                raise ParallelError(
                    f"{name} is complex, and torch's DistributedDataParallel adds up real gradients alone. Use FullyShard(), "
                    "TensorParallel() or PipelineParallel(), or keep it as two real parameters."
                )
    kind = type(optimizer).__name__
    if kind in _WHOLE_MATRICES and (layout.shard > 1 or layout.tensor > 1):
        raise ParallelError(
            f"{kind} looks at whole matrices, and {layout} leaves each worker a part of them. Use DataParallel() or "
            "PipelineParallel(), or another optimizer, such as AdamW."
        )
