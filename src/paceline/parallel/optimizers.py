"""Replace the parameters of the user's optimizer, which stays the same object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.parallel.errors import ParallelError
from paceline.parallel.full_tensor import is_part


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the names of the optimizer's parameters in the model, as [group][parameter].

    Raises:
        ParallelError: The optimizer has a parameter that is not the model's, or its step needs a closure.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ParallelError(
            "LBFGS calls the model several times in each step, through a closure, which step() can't give it. "
            "Use an optimizer whose step() takes no closure, such as AdamW or SGD."
        )
    names = {id(param): name for name, param in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ParallelError(
                    f"the optimizer's parameter {index} of group {number} (shape {list(param.shape)}) is not one of the "
                    "model's. Make the optimizer from this model's parameters(), after the last change to the model; "
                    "parameters of the loss belong into the model."
                )
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


_guards: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()


def guard(optimizer: torch.optim.Optimizer, is_stepping: Callable[[], bool]) -> None:
    """Make `optimizer.step()` raise while `is_stepping()` is False.

    Gradients that a script computes itself belong to one rank. A step with them would make the ranks diverge.
    """
    # Remove the hook that an earlier `parallelize` has set on this optimizer: the hook would refuse steps of the new training.
    if (before := _guards.pop(optimizer, None)) is not None:
        before.remove()

    def refuse(*_: object) -> None:
        if not is_stepping():
            raise ParallelError(
                "optimizer.step() was called beside par.step(), with the gradients of a single rank. par.step(batch) computes "
                "the gradients of the whole batch and steps the optimizer: call only that."
            )

    _guards[optimizer] = optimizer.register_step_pre_hook(refuse)


def adopt(
    optimizer: torch.optim.Optimizer,
    names: list[list[str]],
    old: Mapping[str, nn.Parameter],
    new: Mapping[str, nn.Parameter],
) -> None:
    """Replace the optimizer's parameters `old` by `new`, with their state.

    Parameters that this rank does not hold are removed from their group. The optimizer and its groups stay the same
    objects, so schedulers keep working. If a parameter is now split, its state is split in the same way.
    """
    state = optimizer.state
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        for name in (name for name in of_group if new.get(name) is not old[name]):
            # The key of an optimizer's state is the parameter itself, so move the state to the new parameter.
            values = state.pop(old[name], {})
            if values and name in new:
                state[new[name]] = {key: _cut(value, old[name], new[name]) for key, value in values.items()}
        group["params"] = [new[name] for name in of_group if name in new]
        if len({getattr(param, "device_mesh", None) for param in group["params"]}) > 1:
            # Switch `fused` and `foreach` off, because these implementations don't accept a mix of DTensors and plain tensors.
            group.update(dict.fromkeys(group.keys() & {"foreach", "fused"}, False))


def _cut(value: object, before: Tensor, after: nn.Parameter) -> object:
    if not is_part(after) or not isinstance(value, Tensor) or value.shape != before.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, after.device_mesh, after.placements)


class OriginalParameters:
    """The optimizer's parameters before the layout replaces them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._params = dict(model.named_parameters())
        self._names = names_of(optimizer, model) if optimizer is not None else []

    def hand_over(self, optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> None:
        adopt(optimizer, self._names, self._params, params)

    def forget(self) -> None:
        """Drop the references to the whole parameters, to free their memory."""
        self._params = {}
