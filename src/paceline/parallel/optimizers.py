"""The user's optimizer, kept as the same object while the parameters under it change. Loaded on use: imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from paceline.parallel.errors import ParallelError


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """[group][parameter] -> its name in the model (the first, of a tied one). Asked before the model is changed.

    Raises:
        ParallelError: it holds a parameter that is not the model's, or can't be stepped without a closure.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ParallelError(
            "LBFGS calls the model several times in each step, through a closure, which step() can't give it. "
            "Use an optimizer whose step() takes no closure, such as AdamW or SGD."
        )
    names = {id(param): name for name, param in model.named_parameters()}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        of_group = []
        for index, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ParallelError(
                    f"the optimizer's parameter {index} of group {number} (shape {list(param.shape)}) is not one of the "
                    "model's. Make the optimizer from this model's parameters(), after the last change to the model; "
                    "parameters of the loss belong into the model."
                )
            of_group.append(names[id(param)])
        found.append(of_group)
    return found


_guards: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()


def guard(optimizer: torch.optim.Optimizer, is_stepping: Callable[[], bool]) -> None:
    """From now on a step of the optimizer is refused while `is_stepping()` is False.

    Gradients that a script has computed by itself are those of one rank: after such a step the ranks would go apart
    without a word.
    """
    # An optimizer may be given to parallelize again: the hook of the training before would refuse the steps of this one.
    before = _guards.pop(optimizer, None)
    if before is not None:
        before.remove()

    def refuse(*_: Any) -> None:
        if not is_stepping():
            raise ParallelError(
                "optimizer.step() was called beside par.step(), with gradients of one rank alone. par.step(batch) computes the "
                "gradients of the whole batch and steps the optimizer: call it alone."
            )

    _guards[optimizer] = optimizer.register_step_pre_hook(refuse)


def adopt(
    optimizer: torch.optim.Optimizer,
    names: list[list[str]],
    old: Mapping[str, nn.Parameter],
    new: Mapping[str, nn.Parameter],
) -> None:
    """Let the optimizer go on with `new`, by name, in the same groups; what this rank doesn't hold leaves its group.

    The object, its groups' settings and so its schedulers stay. State that it has (after steps, or loaded) goes over,
    cut as its parameter is.
    """
    state = optimizer.state
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        held = [name for name in of_group if name in new]
        for name in of_group:
            before = old[name]
            if name in new and new[name] is before:
                continue
            # torch keeps an optimizer's state under the parameter itself, not under its name.
            values = state.pop(before, None)
            if values and name in new:
                state[new[name]] = {key: _cut(value, before, new[name]) for key, value in values.items()}
        group["params"] = [new[name] for name in held]
        if len({getattr(param, "device_mesh", None) for param in group["params"]}) > 1:
            # The fused and foreach forms of optimizers take no list in which DTensors and plain tensors are mixed.
            for way in ("foreach", "fused"):
                if way in group:
                    group[way] = False


def _cut(value: Any, before: Tensor, after: nn.Parameter) -> Any:
    """State of the shape of the parameter is cut as the parameter is; anything else (a step's number) stays."""
    placements: Any = getattr(after, "placements", None)
    if placements is None or not isinstance(value, Tensor) or value.shape != before.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    whole: Any = after
    return distribute_tensor(value, whole.device_mesh, placements)
