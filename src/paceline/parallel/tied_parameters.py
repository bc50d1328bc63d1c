"""Tied parameters: one tensor with several names, of which the first identifies the tensor.

In a pipeline, each stage that uses a tied tensor has a copy. Without `StageTies` each copy would learn only from its
stage's gradient. Buffers that the forward pass changes are never in two stages: `boundaries` forbids such cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel import reduce
from paceline.parallel.mesh import World, coordinates, group_over


def find(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that share one tensor, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, tensor in all_names(model):
        names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def first_names(model: nn.Module) -> dict[str, str]:
    """Return name -> first name of the same tensor, for every parameter and buffer."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in all_names(model)}


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return a tensor's module, and the tensor's name in this module."""
    owner, _, last = name.rpartition(".")
    return model.get_submodule(owner), last


def tie_again(model: nn.Module, ties: Sequence[tuple[str, ...]]) -> None:
    """Make all names of each group in `ties` refer to one parameter again."""
    for first, *others in ties:
        owner, last = owner_of(model, first)
        tensor = getattr(owner, last)
        for other in others:
            owner, last = owner_of(model, other)
            setattr(owner, last, tensor)


def all_names(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of every parameter and buffer, once for each name."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


class StageTies:
    """The parameters that are in several pipeline stages, and their groups of ranks.

    Every rank must make this object. `uses` has the names of each stage's modules, parameters and buffers.

    Attributes:
        holders: First name -> the stages that use the parameter, if there are several.
    """

    def __init__(self, model: nn.Module, uses: Sequence[frozenset[str]], world: World) -> None:
        self._world = world
        first = first_names(model)
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        # Use a dict: all ranks must make the groups below in the same order, and a set's order differs between processes.
        held: dict[str, set[int]] = {}
        for stage, names in enumerate(uses):
            for name in held_tensors(model, names):
                if name in params:
                    held.setdefault(first[name], set()).add(stage)
        self.holders = {name: tuple(sorted(stages)) for name, stages in held.items() if len(stages) > 1}
        workers = world.extent("pipe")
        # With an interleaved schedule, stage n is on worker n % workers. Stages on the same worker share the tensor itself.
        ranks = {name: frozenset(stage % workers for stage in stages) for name, stages in self.holders.items()}
        here = world.coordinate("pipe")
        #: The process groups of this worker, each with the names of the parameters that its ranks share.
        self._own: list[tuple[dist.ProcessGroup | None, list[str]]] = []
        # Sort the sets, because all ranks must make the groups in the same order.
        for members in sorted(set(ranks.values()), key=sorted):
            if len(members) > 1:
                group = _group(members, world)
                if here in members:
                    self._own.append((group, [name for name, own in ranks.items() if own == members]))

    def sum_gradients(self, params: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients over each parameter's copies. Every rank must call this."""
        for group, names in self._own:
            reduce.sum_gradients([params[name] for name in names], group)


def held_tensors(model: nn.Module, names: frozenset[str]) -> list[str]:
    """Return the names of all tensors in `names`, or in modules in `names`."""
    prefixes = tuple(f"{name}." for name in names)
    return [name for name, _ in all_names(model) if name in names or name.startswith(prefixes)]


def _group(members: frozenset[int], world: World) -> dist.ProcessGroup | None:
    if len(members) == world.extent("pipe"):
        return world.group("pipe")
    ranks = [rank for rank in range(world.size) if coordinates(world.layout, rank)["pipe"] in members]
    return group_over(world.layout, frozenset({"pipe"}), ranks)
