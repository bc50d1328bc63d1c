"""Checks of arguments that functions for several frameworks take alike."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from paceline.compat.horovod.common.ops import Average

T = TypeVar("T")


def checked_group(tensors: Iterable[T]) -> list[T]:
    """The tensors of a grouped operation.

    Raises:
        ValueError: there are none.
    """
    given = list(tensors)
    if not given:
        raise ValueError("a grouped operation needs at least one tensor; the list is empty.")
    return given


def check_predivide(factor: float, op: int) -> None:
    """Refuse a `gradient_predivide_factor` that can't be applied.

    Raises:
        ValueError: it is not more than 0, or averages are not what was asked for.
    """
    if factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if factor <= 0:
        raise ValueError(f"gradient_predivide_factor={factor}: it must be more than 0.")


def chosen_groups(groups: Any, num_groups: int) -> Any:
    """`groups`, or what its old name says. Called by what the script calls."""
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
    return groups if groups is not None else num_groups or None


def in_parts(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """The items in so many parts, as long as each other where that can be; each item alone if there are fewer."""
    count = min(count, len(items))
    return [items[part * len(items) // count : (part + 1) * len(items) // count] for part in range(count)]


def check_groups(groups: Any, members: str = "variables") -> None:
    """Refuse `groups` of gradients that are neither a number of groups nor lists of variables. members: what those are called.

    Raises:
        ValueError: the value, and the rule.
    """
    # A bool is an int to Python, but `groups=True` is a mistake.
    is_number = isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0
    is_lists = isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)
    if not is_number and not is_lists:
        raise ValueError(f"groups={groups!r} should be a non-negative integer or a list of lists of {members}.")


def checked_layers(local_layers: Any, weights: str) -> tuple[Any, ...]:
    """The layers as a tuple; one alone, or None, is accepted too. weights: the attribute with which each lists its own.

    Raises:
        ValueError: something among them has no weights.
    """
    if local_layers is None:
        return ()
    layers: Sequence[Any] = tuple(local_layers) if isinstance(local_layers, Iterable) else (local_layers,)
    for layer in layers:
        if not hasattr(layer, weights):
            raise ValueError(f"local_layers has {layer!r}, which is not a Keras layer.")
    return tuple(layers)
