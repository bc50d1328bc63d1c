"""Settings of reductions of tensors and gradients in all frameworks, and checks of arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from paceline.compat.horovod.common.ops import ENGINE_NAMES, Average
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.common.types import Groups, KerasLayer, Layers

T = TypeVar("T")
G = TypeVar("G")


class Compressor:
    """The interface of gradient compression. Users may write their own classes."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the received tensor in its original form, by `compress`'s context."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """A compressor that leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


def checked_group(tensors: Iterable[T]) -> list[T]:
    """Return the tensors of a grouped operation as a non-empty list."""
    group = list(tensors)
    if not group:
        raise ValueError("a grouped operation needs at least one tensor; the list is empty.")
    return group


def check_predivide(factor: float, op: int) -> None:
    """Raise an error if `gradient_predivide_factor` cannot be applied to `op`."""
    if factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if factor <= 0:
        raise ValueError(f"gradient_predivide_factor={factor}: it must be more than 0.")


def chosen_groups(groups: G | None, num_groups: int) -> G | int | None:
    """Return `groups`, or the value of its old name `num_groups` with a warning."""
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
    return groups if groups is not None else num_groups or None


def in_parts(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Split the items into at most `count` nearly equal parts."""
    count = min(count, len(items))
    return [items[part * len(items) // count : (part + 1) * len(items) // count] for part in range(count)]


def check_groups(groups: object, members: str = "variables") -> None:
    """Raise an error if `groups` is neither a number nor lists of `members`."""
    # In Python, a bool is also an int, but `groups=True` is a mistake.
    is_number = isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0
    is_lists = isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)
    if not is_number and not is_lists:
        raise ValueError(f"groups={groups!r} should be a non-negative integer or a list of lists of {members}.")


def checked_layers(local_layers: Layers, weights: str) -> tuple[KerasLayer, ...]:
    """Return layers as a tuple. Raise if one lacks the attribute that `weights` names."""
    # A Keras layer has the attribute `weights`, so treat any object with this attribute as a layer.
    if local_layers is None:
        return ()
    layers = tuple(local_layers) if isinstance(local_layers, Iterable) else (local_layers,)
    for layer in layers:
        if not hasattr(layer, weights):
            raise ValueError(f"local_layers has {layer!r}, which is not a Keras layer.")
    return layers


class How(NamedTuple):
    """Settings of a reduction of tensors: operation, scale factors and process set."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set

    def engine(self) -> dict[str, object]:
        """Return these settings as keyword arguments of the collective engine."""
        op, prescale, postscale, _ = self
        return {"op": ENGINE_NAMES[op], "prescale": float(prescale), "postscale": float(postscale)}


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Settings of a reduction of gradients.

    Attributes:
        op: The reduce operation, such as Average.
        compression: A class that compresses gradients before the reduction.
        sparse_as_dense: Make sparse gradients dense before the reduction.
        gradient_predivide_factor: Divides gradients before the sum, so that float16 does not overflow. Multiplies the
            average, so that the result stays the same.
        groups: Number of groups, or lists of variables. The gradients of a group are reduced as one operation.
        process_set: The ranks that take part.
        scale_local_gradients: Divide gradients that stay on their rank by the number of ranks.
        prefix: Prefix of the names that match gradients across ranks.

    Raises:
        ValueError: The settings contradict each other.
    """

    op: int = Average
    compression: type[Compressor] = NoneCompressor
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    prefix: str = "DistributedOptimizer"

    def __post_init__(self) -> None:
        if self.op not in ENGINE_NAMES:
            raise ValueError(f"op={self.op!r} is not an operation of Horovod's. Give hvd.Average, hvd.Sum, hvd.Adasum.")
        check_predivide(self.gradient_predivide_factor, self.op)
        if self.groups is not None:
            check_groups(self.groups)

    @cached_property
    def how(self) -> How:
        """Settings used to reduce dense gradients."""
        # Divide by gradient_predivide_factor before the sum, and multiply after it: smaller sums don't overflow in float16.
        return How(self.op, 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor, self.process_set)
