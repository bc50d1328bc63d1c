"""The names of a model's tensors, of which one tensor may have several. Loaded on use: it imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def find(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names that share one parameter or buffer, by identity; each group in the model's order, first name first."""
    names: dict[int, list[str]] = {}
    for name, tensor in all_names(model):
        names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in all_names(model)}


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module in which something of this name lies, and its name there."""
    owner, _, last = name.rpartition(".")
    return model.get_submodule(owner), last


def tie_again(model: nn.Module, ties: Sequence[tuple[str, ...]]) -> None:
    """Give all names of a tie the tensor of the first."""
    for first, *others in ties:
        owner, last = owner_of(model, first)
        tensor = getattr(owner, last)
        for other in others:
            owner, last = owner_of(model, other)
            setattr(owner, last, tensor)


def all_names(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer with every name it has, in the model's order."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
