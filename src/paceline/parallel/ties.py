"""Tensors of a model that have more than one name. Loaded on use: it imports torch."""

from __future__ import annotations

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


def all_names(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer with every name it has, in the model's order."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
