"""Parameters that several stages of a pipeline use: each has a copy, and the copies get one gradient. Imports torch.

Left alone, each copy would learn from its own stage's gradient, with a loss that looks right. Buffers that the forward pass
changes are never in two stages: `boundaries` doesn't cut there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from paceline.parallel import reduce
from paceline.parallel.mesh import World, coordinates, group_over
from paceline.parallel.ties import all_names, first_names


class StageTies:
    """holders: first name -> the stages that use the parameter, where it is more than one. Made on all ranks.

    uses: for each stage, the modules, parameters and buffers that it holds.
    """

    def __init__(self, model: nn.Module, uses: Sequence[frozenset[str]], world: World) -> None:
        self._world = world
        first = first_names(model)
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        # Groups are made below in the order in which names come here, and every rank has to make them in one order. So
        # there is no set among these: the order of a set of texts differs from process to process.
        held: dict[str, set[int]] = {}
        for stage, names in enumerate(uses):
            for name in held_tensors(model, names):
                if name in params:
                    held.setdefault(first[name], set()).add(stage)
        self.holders = {name: tuple(sorted(stages)) for name, stages in held.items() if len(stages) > 1}
        workers = world.extent("pipe")
        # With an interleaved schedule stage n is on worker n modulo their number; two stages of one worker share the tensor
        # itself.
        ranks = {name: frozenset(stage % workers for stage in stages) for name, stages in self.holders.items()}
        here = world.coordinate("pipe")
        #: Of each group that this worker is in, the names of what its workers share.
        self._own: list[tuple[Any, list[str]]] = []
        # Sorted, for all ranks have to make the groups in one order.
        for members in sorted(set(ranks.values()), key=sorted):
            if len(members) > 1:
                group = _group(members, world)
                if here in members:
                    self._own.append((group, [name for name, own in ranks.items() if own == members]))

    def sum_gradients(self, params: Mapping[str, nn.Parameter]) -> None:
        """Give every copy the sum of all copies' gradients. Called on all ranks."""
        for group, names in self._own:
            reduce.sum_gradients([params[name] for name in names], group)


def held_tensors(model: nn.Module, names: frozenset[str]) -> list[str]:
    """The names of all parameters and buffers that lie in these modules, or are named themselves, in the model's order."""
    prefixes = tuple(f"{name}." for name in names)
    return [name for name, _ in all_names(model) if name in names or name.startswith(prefixes)]


def _group(members: frozenset[int], world: World) -> Any:
    """The ranks with these stages that share all other coordinates."""
    if len(members) == world.extent("pipe"):
        return world.group("pipe")
    ranks = [rank for rank in range(world.size) if coordinates(world.layout, rank)["pipe"] in members]
    return group_over(world.layout, frozenset({"pipe"}), ranks)
