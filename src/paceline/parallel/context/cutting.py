"""Blocks that compute a part of each sequence. Loaded on use: it imports torch.

    tokens -> embedding, positions, masks -> block 0 ... block n -> head -> loss
              whole, on each worker          parts              whole, on each worker

The first block of a list takes this worker's places of what it is given, the last one gives the whole; in between only
attention talks. What the model computes outside of its blocks is computed by every worker alike, so positions, shifted labels
and losses are those of the whole, and no user's code has to know of it.

Each worker's loss counts for 1 / n, and gradients are summed over the workers: then each parameter's is right, wherever it is
used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.context.attention import attending_to_all
from paceline.parallel.context.sequence import Places
from paceline.parallel.errors import ParallelError
from paceline.parallel.experts.found import list_of
from paceline.parallel.mesh import World
from paceline.parallel.other_class import SharedByCopies, give_forward
from paceline.parallel.pytree import map_tensors, tensors_in

_LISTS = (nn.ModuleList, nn.Sequential)


def apply(model: nn.Module, world: World) -> list[str]:
    """Let the blocks compute this rank's part of each sequence, in place; what was done, in words.

    Raises:
        ParallelError: there is no list of blocks, or none of a name.
    """
    layout = world.layout
    names = _lists(model) if layout.context_lists is None else list(layout.context_lists)
    if not names:
        raise ParallelError(
            f"ContextParallel({layout.context}): {type(model).__name__} has no list of blocks (nn.ModuleList, nn.Sequential) "
            "between whose first and last its sequences could be cut. Keep its blocks in one, or use another strategy."
        )
    for name in names:
        try:
            found = model.get_submodule(name)
        except AttributeError:
            found = None
        if not isinstance(found, _LISTS) or not len(found):
            raise ParallelError(
                f"ContextParallel(lists=[{name!r}]) is no list of blocks of {type(model).__name__}. It has: "
                f"{', '.join(_lists(model)) or 'none'}."
            )
        _List(name, list(found), world, layout.context_dim).begin()
    return [
        f"sequences are cut between the first and the last block of {', '.join(name or 'the model' for name in names)}"
    ]


def _lists(model: nn.Module, prefix: str = "") -> list[str]:
    """The outermost lists of blocks; of lists in a list, the inner ones. Experts are no blocks: each is given some places."""
    if isinstance(model, _LISTS) and len(model) and not any(isinstance(child, nn.ModuleList) for child in model):
        return [prefix]
    experts = list_of(model)
    children = {own: child for own, child in model.named_children() if child is not experts}
    return [name for own, child in children.items() for name in _lists(child, f"{prefix}.{own}" if prefix else own)]


class _List(SharedByCopies):
    """A list of blocks, all of which are called in their order."""

    def __init__(self, name: str, blocks: list[nn.Module], world: World, dim: int) -> None:
        self._name, self._blocks, self._dim = name, blocks, dim
        self._group = world.group("context")
        self._known: dict[int, Places] = {}
        #: Those of the sequence that is under way.
        self.places: Places | None = None

    def begin(self) -> None:
        for index, block in enumerate(self._blocks):
            if isinstance(block, InParts):
                raise ParallelError(
                    f"ContextParallel(): {self._name}.{index} computes parts of sequences already. Give parallelize a model that "
                    "it was not given before, and each block one place in the lists."
                )
            if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
                raise ParallelError(
                    f"ContextParallel(): {self._name}.{index} has a forward of its own on the object, or is a script, and can't "
                    "be given a part of a sequence. Give the module as it was before, or name the lists that can: "
                    "ContextParallel(lists=[...])."
                )
            give_forward(block, InParts, _in_parts)
            held: Any = block
            held._paceline_list = self
            # Hooks are outside of what is computed again in a backward pass, so that the parts are what is kept for it.
            block.register_forward_pre_hook(self._taking(index), with_kwargs=True)
        self._blocks[-1].register_forward_hook(self._giving)

    def _taking(self, index: int) -> Callable[..., Any]:
        def take(block: nn.Module, args: Any, kwargs: Any) -> Any:
            given = next(iter(tensors_in((args, kwargs))), None)
            if given is None or given.dim() <= self._dim:
                seen = "no tensor" if given is None else list(given.shape)
                raise ParallelError(
                    f"ContextParallel(): {self._name}.{index} is given {seen}, and "
                    f"dimension {self._dim} of its first one is to be the sequence. Name that: ContextParallel(dim=...), or the "
                    "lists whose blocks take sequences: ContextParallel(lists=[...])."
                )
            size = given.shape[self._dim]
            if index == 0:
                if size not in self._known:
                    self._known[size] = Places(size, self._group, given.device)
                self.places = self._known[size]
            elif self.places is None or size != self.places.own:
                raise ParallelError(
                    f"ContextParallel(): {self._name}.{index} is given a sequence of {size}, and this worker's part has "
                    f"{self.places.own if self.places else 'none'}. All blocks of a list have to be called one after the other."
                )
            places = self.places
            assert places is not None

            def part(tensor: Tensor) -> Tensor:
                if tensor is given:
                    return tensor if index else places.take(tensor, self._dim)
                return _part(tensor, places, self._dim)

            return map_tensors(args, part), map_tensors(kwargs, part)

        return take

    def _giving(self, block: nn.Module, args: Any, output: Any) -> Any:
        places = self.places
        assert places is not None

        def whole(tensor: Tensor) -> Tensor:
            is_part = tensor.dim() > self._dim and tensor.shape[self._dim] == places.own
            return places.together(tensor, self._dim) if is_part and tensor.is_floating_point() else tensor

        return map_tensors(output, whole)


def _part(tensor: Tensor, places: Places, dim: int) -> Tensor:
    """This rank's places of what a block is given, by its shape: hidden states, masks, positions."""
    length, shape = places.length, tensor.shape
    if tensor.dim() >= 2 and shape[-1] == shape[-2] == length:
        # A mask of queries and keys: it has all keys.
        return places.take(tensor, tensor.dim() - 2)
    if tensor.dim() > dim and shape[dim] == length:
        return places.take(tensor, dim)
    if tensor.dim() in (1, 2) and shape[0] == length:
        return places.take(tensor, 0)
    return tensor


class InParts:
    """Mixed into the class of a block that computes a part of a sequence."""


def _in_parts(kind: Any, block: Any, /, *args: Any, **kwargs: Any) -> Any:
    with attending_to_all(block._paceline_list.places):
        return kind.forward(block, *args, **kwargs)
