"""Refuses what a layout can't train, by its name and before the first step. Loaded on use: imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.experts.found import is_fused
from paceline.parallel.ties import find
from paceline.torch_private import BatchNorm

if TYPE_CHECKING:
    from paceline.parallel.strategy import Layout

#: Optimizers that torch's DTensor has no rule for, and why: they write to a parameter, or to a gradient, in place.
_NOT_IN_PARTS = {"Adafactor": "looks at whole matrices", "Rprop": "changes single numbers of a gradient in place"}


def check_fits(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, layout: Layout, microbatches: int = 1
) -> None:
    """Nothing where the layout can train this model with this optimizer.

    Raises:
        ParallelError: it can't, where torch would fail in the middle of a step with words of its own.
    """
    if layout.replicas > 1 or layout.tensor > 1 or layout.context > 1:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
                raise ParallelError(
                    f"{name or 'the model'} has sparse gradients (sparse=True), which {layout} does not exchange. Make it "
                    "with sparse=False, or use PipelineParallel() alone."
                )
    if layout.replicas > 1 or microbatches > 1:
        for name, module in model.named_modules():
            if (
                isinstance(module, (nn.Embedding, nn.EmbeddingBag))
                and module.scale_grad_by_freq
                and module.weight.requires_grad
            ):
                raise ParallelError(
                    f"{name or 'the model'} divides gradients by how often a row is in the batch (scale_grad_by_freq=True), of "
                    f"which {layout} with {microbatches} microbatches computes each part by itself. Make it with "
                    "scale_grad_by_freq=False, or compute each batch in one part: microbatches=1 and accumulate=1 under "
                    "TensorParallel()."
                )
    _refuse_renormalised(model, layout)
    if layout.replicas > 1 and layout.shard == 1 and layout.pipe == 1:
        for name, param in model.named_parameters():
            if param.is_complex() and param.requires_grad:
                raise ParallelError(
                    f"{name} is complex, and torch's DistributedDataParallel adds up real gradients alone. Keep it as real "
                    "numbers (torch.view_as_complex(param) in the forward), or use PipelineParallel(), or FullyShard() where all "
                    "parameters of a block have one type."
                )
    if layout.context > 1:
        for name, module in model.named_modules():
            if isinstance(module, BatchNorm):
                raise ParallelError(
                    f"{name or 'the model'} normalises over a batch, and under {layout} each worker has a part of each sequence. "
                    "Use LayerNorm or GroupNorm over features, or DataParallel()."
                )
    if layout.tensor > 1 or layout.context > 1 or layout.expert > 1:
        for name, module in model.named_modules():
            if is_compiled(module):
                raise ParallelError(
                    f"{name or 'the model'} is compiled, and what was compiled doesn't compute with the parts that {layout} "
                    "makes of it. Give parallelize the model as it was before torch.compile, or use "
                    "DataParallel() or FullyShard()."
                )
    if layout.tensor > 1 or layout.shard > 1:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise ParallelError(
                    f"{name or 'the model'} is a module of TorchScript (torch.jit), whose parameters {layout} can't cut. Give "
                    "the module as it was before torch.jit, or use DataParallel() or PipelineParallel()."
                )
    kind = type(optimizer).__name__
    cuts_experts = layout.expert > 1 and any(is_fused(module) for module in model.modules())
    if kind in _NOT_IN_PARTS and (layout.shard > 1 or layout.tensor > 1 or cuts_experts):
        raise ParallelError(
            f"{kind} {_NOT_IN_PARTS[kind]}, and {layout} leaves each worker a part of them. Use DataParallel() or "
            "PipelineParallel(), or another optimizer, such as AdamW."
        )


def _refuse_renormalised(model: nn.Module, layout: Layout) -> None:
    """Raises:
    ParallelError: an embedding scales the rows that its batch looks up, and not every copy of it gets the same batch.
    """
    tied = {name for group in find(model) for name in group}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if max(layout.replicas, layout.context, layout.expert) > 1:
            why = "of which each worker looks up others, so that their copies would differ"
        elif layout.pipe > 1 and f"{name}.weight".lstrip(".") in tied:
            why = "and another stage may hold a copy of the tied weight, which stays as it is"
        else:
            continue
        raise ParallelError(
            f"{name or 'the model'} ({type(module).__name__}) with max_norm={module.max_norm} scales the rows that it looks "
            f"up in its forward, {why} under {layout}. Use TensorParallel(), where all workers look up the same rows, or leave "
            "max_norm out."
        )


def is_compiled(module: nn.Module) -> bool:
    """Say if torch.compile was called on this module, or its own `compile`."""
    # torch.compile(module) is another module around the first one; module.compile() only sets an attribute.
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
