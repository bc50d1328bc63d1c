"""Activation checkpointing: the backward pass computes blocks a second time, which saves memory.

Each block's forward is wrapped in `torch.utils.checkpoint`, non-reentrant. Only the block's class changes (`class_swap`), so
copies, names and hooks keep working.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from paceline.parallel.class_swap import give_forward
from paceline.parallel.errors import ParallelError
from paceline.parallel.pytree import map_tensors
from paceline.parallel.replicas import normalization
from paceline.parallel.replicas.shard import find_units

_T = TypeVar("_T")


class Recomputed:
    """A mixin for classes of blocks that the backward pass computes again."""


def recompute(model: nn.Module, blocks: str | Sequence[str]) -> tuple[str, ...]:
    """Make blocks recompute their activations in the backward pass. Return the blocks' names.

    `blocks` is "blocks" for the elements of the model's lists, as in FullyShard(), or a list of `fnmatch` patterns.

    Raises:
        ParallelError: The model has no blocks, or a pattern matches no module.
    """
    if blocks == "blocks":
        names = find_units(model)
        if not names:
            raise ParallelError(
                f"recompute='blocks': {type(model).__name__} has no list of modules (nn.ModuleList, nn.Sequential) whose "
                "elements could be computed again. Name them: recompute=['encoder', 'decoder.layer*']."
            )
    else:
        names = []
        every = [name for name, _ in model.named_modules() if name]
        for pattern in blocks:
            matching = [name for name in every if fnmatchcase(name, pattern)]
            if not matching:
                raise ParallelError(
                    f"recompute={list(blocks)!r}: {pattern!r} matches no module. This model has, among others: "
                    f"{', '.join(every[:8])}."
                )
            names += matching
        names = list(dict.fromkeys(names))
    for name in names:
        module = model.get_submodule(name)
        if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
            raise ParallelError(
                f"recompute: {name} has a forward of its own on the object, or is a script, and can't be computed again. Leave "
                "it out: recompute=[<patterns of the other blocks>]."
            )
        if not isinstance(module, Recomputed):
            give_forward(module, Recomputed, _computed_again)
    return tuple(names)


def _computed_again(kind: type[nn.Module], block: nn.Module, /, *args: object, **kwargs: Any) -> object:
    # `checkpoint` runs a first pass without gradients. Don't recompute inner blocks in this pass, which would triple the work.
    if not torch.is_grad_enabled():
        return kind.forward(block, *args, **kwargs)
    # Copy containers for the second pass: the model may change a list or dict argument, as DenseNet does.
    inputs = _copied((args, kwargs))
    passes = iter([(args, kwargs)])

    def forward(block: nn.Module, /, *_: object, **__: object) -> object:
        own, named = next(passes, None) or _copied(inputs)
        return kind.forward(block, *own, **named)

    return checkpoint(
        forward,
        block,
        # Pass the arguments too: `checkpoint` looks in them for devices, whose random state it restores for the second pass.
        *args,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), _second(block, normalization.counting_as_now())),
        **kwargs,
    )


def _copied(value: _T) -> _T:
    return map_tensors(value, lambda tensor: tensor)


@contextlib.contextmanager
def _second(block: nn.Module, counting: AbstractContextManager[None]) -> Iterator[None]:
    """Let a block run again in the backward pass without side effects.

    Within the context `counting`, normalisation treats padding as in the forward pass. Afterwards the block's buffers and
    counters are restored.
    """
    saved = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    plain = [(module, dict(_numbers(module))) for module in block.modules()]
    try:
        with counting:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                # Copy through `.data`. Otherwise autograd, which may still need the tensors that it saved, would notice a change.
                buffer.data.copy_(value)
        for module, own in plain:
            vars(module).update(own)


def _numbers(module: nn.Module) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in itertools.islice(vars(module).items(), 200) if type(value) in (int, float))


@contextlib.contextmanager
def checkpoints_opened() -> Iterator[None]:
    """Within the block, replace reentrant checkpoints by plain calls, with the same results.

    torch.autograd.grad refuses `checkpoint(use_reentrant=True)`, because its inner operations are not in the graph.
    """

    def apply(kind: type, /, function: Callable[..., object], keeps_random: bool, *args: object) -> object:
        return function(*args)

    CheckpointFunction.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        # Delete the override, so that CheckpointFunction inherits `apply` from its base class again.
        del CheckpointFunction.apply
