"""Reduction of gradients for optimizers and tapes, eagerly and within a graph."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TypeVar
from zlib import crc32

import tensorflow as tf

from paceline.compat.horovod.common.process_sets import registered_ranks
from paceline.compat.horovod.common.reduction import How, Reduction, in_parts
from paceline.compat.horovod.tensorflow.allreduce import reduce_all
from paceline.compat.horovod.tensorflow.arrays import Gradient
from paceline.compat.horovod.tensorflow.gradient_aggregation import Accumulator
from paceline.compat.horovod.tensorflow.launch import ALONE_BYTES, as_written, bytes_of
from paceline.compat.horovod.tensorflow.names import key, unique_in_graph, variable_names

T = TypeVar("T")

__all__ = ["Accumulator", "Reduction", "distributed", "divided", "reduce_gradients"]


@as_written
def reduce_gradients(
    grads: Sequence[Gradient], variables: Sequence[tf.Variable], how: Reduction, local: Collection[tf.Variable] = ()
) -> list[Gradient]:
    """Reduce gradients, each dense, sparse or None, over the ranks.

    The gradients of `local` variables are not reduced. `how.scale_local_gradients` divides them by the number of ranks.
    Ranks match gradients by the variables' paths or names, so each rank may list the variables in another order. A rank
    outside the process set keeps its gradients.
    """
    result: list[tf.Tensor] = list(grads)
    size = len(registered_ranks(how.process_set))
    if len(grads) != len(variables):
        raise ValueError(f"{len(grads)} gradients were given for {len(variables)} variables: give one for each.")
    own = {key(variable) for variable in local}
    shared = [i for i, grad in enumerate(grads) if grad is not None and key(variables[i]) not in own]
    if how.scale_local_gradients:
        for i, grad in enumerate(grads):
            if grad is not None and key(variables[i]) in own:
                result[i] = divided(grad, size)
    if how.sparse_as_dense:
        for i in shared:
            result[i] = tf.convert_to_tensor(grads[i])
    # With one rank, a reduction changes nothing. Check at each call, because an elastic world may grow.
    is_alone = size == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
    if not shared or is_alone or not how.process_set.included():
        return result
    prefix = unique_in_graph(how.prefix)
    # Also name the variables that have no gradient on this rank: a repeated name gets a number, which must be the same on all
    # ranks.
    names = [f"{prefix}.{name}" for name in variable_names(variables)]
    # Sort by name, because group members are matched by position, and ranks may list their variables in different orders.
    shared.sort(key=names.__getitem__)
    chosen = [sorted(members, key=names.__getitem__) for members in _groups(shared, result, variables, how)]
    groups = [_named(f"{prefix}.group.{number}", members, names) for number, members in enumerate(chosen)]
    left = set(shared) - {i for members in chosen for i in members}
    groups += _small([i for i in shared if i in left], result, variables, names)
    place = {i: number for number, i in enumerate(shared)}
    places = [(name, [place[i] for i in members]) for name, members in groups]
    # Leave out the scale factors: the rows of sparse gradients are gathered, not summed, so the two factors would cancel out.
    sparse = How(op=how.op, process_set=how.process_set)
    reduced = reduce_all(
        [result[i] for i in shared], [names[i] for i in shared], how.how, how.compression, places, sparse
    )
    for i, grad in zip(shared, reduced, strict=True):
        result[i] = grad
    return result


def distributed(wrapped: object, mixin: type[T], what: str) -> T:
    """Return the tape or optimizer `wrapped` as an instance of a subclass with `mixin`."""
    base = type(wrapped)
    if issubclass(base, mixin):
        raise ValueError(f"this {what} is distributed already; its gradients would be reduced twice.")
    cls: type[T] = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    made = cls.__new__(cls)
    made.__dict__.update(vars(wrapped))
    return made


def _groups(
    shared: list[int], grads: list[Gradient], variables: Sequence[tf.Variable], how: Reduction
) -> list[Sequence[int]]:
    """Return the positions in `grads` of each group's dense gradients."""
    dense = [i for i in shared if not isinstance(grads[i], tf.IndexedSlices)]
    groups = how.groups or 0
    if isinstance(groups, int):
        return in_parts(dense, groups)
    place = {key(variable): i for i, variable in enumerate(variables)}
    chosen, seen = [], set()
    for group in groups:
        members = []
        for variable in group:
            label = getattr(variable, "path", None) or getattr(variable, "name", variable)
            if key(variable) not in place:
                raise ValueError(f"groups names the variable {label!r}, which has no gradient among those to reduce.")
            if key(variable) in seen:
                raise ValueError(f"groups names the variable {label!r} twice; each belongs to one group at most.")
            seen.add(key(variable))
            if place[key(variable)] in dense:
                members.append(place[key(variable)])
        chosen.append(members)
    return [members for members in chosen if members]


def _small(
    places: Sequence[int], grads: list[tf.Tensor], variables: Sequence[tf.Variable], names: Sequence[str]
) -> list[tuple[str, list[int]]]:
    """Group the small gradients by dtype. Return each group's (name, positions in `grads`)."""
    by_type: dict[tf.DType, list[int]] = {}
    for i in places:
        # Use the variable's shape, because a gradient's shape may be unknown while a graph is built.
        size = getattr(variables[i], "shape", grads[i].shape)
        is_small = not isinstance(grads[i], tf.IndexedSlices) and bytes_of(size, grads[i].dtype) < ALONE_BYTES
        if is_small:
            by_type.setdefault(grads[i].dtype, []).append(i)
    several = [members for members in by_type.values() if len(members) > 1]
    return [_named(f"{names[members[0]]} and {len(members) - 1} more", members, names) for members in several]


def _named(base: str, members: list[int], names: Sequence[str]) -> tuple[str, list[int]]:
    # The label has a checksum of the gradients' names: ranks may only combine groups of the same gradients.
    return f"{base} ({crc32(chr(10).join(names[i] for i in members).encode()):08x})", members


def divided(grad: tf.Tensor | tf.IndexedSlices, number: int) -> tf.Tensor | tf.IndexedSlices:
    """Return the gradient, dense or sparse, divided by a number."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / number, grad.indices, grad.dense_shape)
    return grad / number
