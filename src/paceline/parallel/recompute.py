"""Activation checkpointing: a block keeps its input alone, and computes the rest again in the backward pass. Imports torch.

By torch's own `torch.utils.checkpoint`, without reentrance, around the forward of each block. A block's class is replaced
(`other_class`): copies of the model, names and hooks go on as they were.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from paceline.parallel.class_swap import give_forward
from paceline.parallel.errors import ParallelError
from paceline.parallel.pytree import map_tensors
from paceline.parallel.replicas import normalization
from paceline.parallel.replicas.shard import find_units


class Recomputed:
    """Mixed into the class of a block that is computed twice."""


def recompute(model: nn.Module, blocks: str | Sequence[str]) -> tuple[str, ...]:
    """Let these blocks be computed again in the backward pass, in place; their names.

    blocks: "blocks" takes the elements of the model's lists, as FullyShard() does; or patterns (`fnmatch`) of names.

    Raises:
        ParallelError: there are none, or a pattern matches no module.
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
            found = [name for name in every if fnmatchcase(name, pattern)]
            if not found:
                raise ParallelError(
                    f"recompute={list(blocks)!r}: {pattern!r} matches no module. This model has, among others: "
                    f"{', '.join(every[:8])}."
                )
            names += found
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


def _computed_again(kind: Any, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    # A block within a block that is computed again would be computed three times.
    if not torch.is_grad_enabled():
        return kind.forward(block, *args, **kwargs)
    # A list or a dict among the arguments may be changed before the second pass, as DenseNet's list of features is.
    given = _copied((args, kwargs))
    passes = iter([(args, kwargs)])

    def forward(block: nn.Module, /, *_: Any, **__: Any) -> Any:
        own, named = next(passes, None) or _copied(given)
        return kind.forward(block, *own, **named)

    return checkpoint(
        forward,
        block,
        # From these it knows the devices whose random numbers it has to repeat.
        *args,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), _second(block, normalization.counting_as_now())),
        **kwargs,
    )


def _copied(value: Any) -> Any:
    """Return the same tensors in containers of their own."""
    return map_tensors(value, lambda tensor: tensor)


@contextlib.contextmanager
def _second(block: nn.Module, counting: AbstractContextManager[None]) -> Iterator[None]:
    """The second pass leaves buffers as they are: running statistics would count each microbatch twice."""
    saved = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    plain = [(module, dict(_numbers(module))) for module in block.modules()]
    try:
        with counting:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                # Through `.data`: autograd may still need what it has saved, and what it sees is not changed.
                buffer.data.copy_(value)
        for module, own in plain:
            vars(module).update(own)


def _numbers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Counters and the like, which the first pass has set already."""
    return ((name, value) for name, value in itertools.islice(vars(module).items(), 200) if type(value) in (int, float))


@contextlib.contextmanager
def checkpoints_opened() -> Iterator[None]:
    """Within the block reentrant checkpoints keep what they compute, as if the function in them were called alone."""

    def apply(kind: Any, function: Callable[..., Any], keeps_random: bool, *args: Any) -> Any:
        return function(*args)

    CheckpointFunction.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        # What is left is the one of its base class.
        del CheckpointFunction.apply
