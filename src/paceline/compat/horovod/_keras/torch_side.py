"""Keras 3 on torch, with the collectives of `horovod.torch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from paceline.compat.horovod import torch as hvd
from paceline.compat.horovod._keras.settings import KerasSettings, key_of, shared_name
from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.ops import Max, Min
from paceline.compat.horovod.common.reduction import in_parts
from paceline.compat.horovod.common.types import Groups, Variable
from paceline.compat.horovod.torch.allreduce import submit_allreduce

Gradient: TypeAlias = "torch.Tensor | None"
Compression = hvd.Compression
allreduce, allgather, broadcast, reducescatter = hvd.allreduce, hvd.allgather, hvd.broadcast, hvd.reducescatter


def reduce(grads: list[Gradient], variables: list[Variable], settings: KerasSettings) -> list[Gradient]:
    """Return the reduced gradients. A gradient that this rank lacks counts as 0."""
    # All ranks must send gradients of the same variables. First find out for which variables any rank has a gradient.
    present = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8)
    anywhere = hvd.allreduce(
        present, op=Max, name=f"{settings.prefix}.present", process_set=settings.process_set
    ).tolist()
    present_grads = {
        index: torch.zeros_like(_value(variable)) if grad is None else grad.to_dense() if grad.is_sparse else grad
        for index, (grad, variable) in enumerate(zip(grads, variables, strict=True))
        if anywhere[index]
    }
    result: list[Gradient] = [present_grads.get(index) for index in range(len(grads))]
    under_way = []
    for members in _groups(list(present_grads), variables, settings.groups):
        sent = [settings.compression.compress(present_grads[index].detach()) for index in members]
        name = f"{settings.prefix}.{shared_name(members[0], variables[members[0]])}"
        tensors = [tensor for tensor, _ in sent]
        handle = submit_allreduce(tensors, name, settings.how, grouped=True)
        under_way.append((members, sent, handle))
    for members, sent, handle in under_way:
        for index, (_, context), reduced in zip(members, sent, handles.synchronize(handle), strict=True):
            result[index] = settings.compression.decompress(reduced, context)
    return result


def on_all_ranks(condition: object, settings: KerasSettings) -> torch.Tensor:
    held = torch.as_tensor(condition).to(torch.int32)
    name = f"{settings.prefix}.finite"
    return hvd.allreduce(held, op=Min, name=name, process_set=settings.process_set).to(torch.bool)


def divided(grad: torch.Tensor, number: int) -> torch.Tensor:
    return grad / number


class Accumulator:
    """Sums or averages of gradients over several backward passes."""

    def __init__(self, passes: int, average: bool = False) -> None:
        self.passes, self.average = passes, average
        self._count = 0
        self._sums: dict[int, torch.Tensor] = {}

    def step(
        self, grads: list[Gradient], variables: Sequence[Variable], act: Callable[[list[Gradient]], object]
    ) -> bool:
        """Add gradients, and call `act` with the sums after the last backward pass.

        Return whether `act` was called.
        """
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None:
                before = self._sums.get(key_of(variable))
                # Copy the gradient of the first pass, because the gradients of later passes are added to it in place.
                self._sums[key_of(variable)] = grad.detach().clone() if before is None else before.add_(grad)
        self._count += 1
        if self._count < self.passes:
            return False
        sums = [self._sums.get(key_of(variable)) for variable in variables]
        # Reset the sums before `act` applies the gradients: even if it raises an exception, the next step starts at 0.
        self._count, self._sums = 0, {}
        act([None if total is None else total / (self.passes if self.average else 1) for total in sums])
        return True


def tensor(value: object) -> torch.Tensor:
    """Convert a number, an array, a tensor or a variable to a tensor."""
    import keras

    converted: torch.Tensor = keras.ops.convert_to_tensor(value)
    return converted.detach()


def _value(variable: Any) -> torch.Tensor:
    parameter: torch.Tensor = getattr(variable, "_value", variable)
    return parameter.detach()


def _groups(indices: list[int], variables: list[Variable], groups: Groups) -> Sequence[Sequence[int]]:
    if not groups:
        return [[index] for index in indices]
    if isinstance(groups, int):
        return in_parts(indices, groups)
    place = {key_of(variable): index for index, variable in enumerate(variables)}
    chosen = [[place[key_of(member)] for member in members if key_of(member) in place] for members in groups]
    lists = [[index for index in members if index in set(indices)] for members in chosen]
    grouped = {index for members in lists for index in members}
    return [members for members in lists if members] + [[index] for index in indices if index not in grouped]
