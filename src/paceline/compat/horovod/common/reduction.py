"""The way in which tensors, and gradients, are reduced: what every framework's functions are told of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from paceline.compat.horovod.common.ops import ENGINE_NAMES, Average
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set

T = TypeVar("T")


class Compressor:
    """The interface: users may write their own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor that was received, as if it had been sent uncompressed."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


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


class How(NamedTuple):
    """The way in which tensors are reduced."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set

    def engine(self) -> dict[str, Any]:
        """The arguments of the engine's reductions that say it."""
        op, prescale, postscale, _ = self
        return {"op": ENGINE_NAMES[op], "prescale": float(prescale), "postscale": float(postscale)}


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The way in which gradients are reduced.

    gradient_predivide_factor: averages are divided by this before the sum, and by the rest of the size after it.
    groups: so many groups of gradients, each reduced as one, or lists of variables.
    sparse_as_dense: sparse gradients are made dense, and reduced as the others.
    scale_local_gradients: gradients that stay on their rank are divided by the number of ranks.
    prefix: begins the names under which gradients meet those of the other ranks.

    Raises:
        ValueError: what doesn't go together.
    """

    op: int = Average
    compression: Any = NoneCompressor
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    prefix: str = "DistributedOptimizer"

    def __post_init__(self) -> None:
        if self.op not in ENGINE_NAMES:
            raise ValueError(f"op={self.op!r} is no operation of Horovod's. Give hvd.Average, hvd.Sum or hvd.Adasum.")
        check_predivide(self.gradient_predivide_factor, self.op)
        if self.groups is not None:
            check_groups(self.groups)

    @cached_property
    def how(self) -> How:
        """The way for dense gradients."""
        # The two factors cancel each other; the sum in between is smaller, so that float16 does not overflow.
        return How(self.op, 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor, self.process_set)
