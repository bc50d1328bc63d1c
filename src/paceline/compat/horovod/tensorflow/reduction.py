"""Gradients over the ranks, as optimizers and tapes reduce them: eagerly and within a graph."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import tensorflow as tf

from paceline.compat.horovod.common.arguments import check_groups, check_predivide
from paceline.compat.horovod.common.ops import ENGINE_NAMES, Average
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set, registered_ranks
from paceline.compat.horovod.common.reduction import How
from paceline.compat.horovod.tensorflow.allreduce import reduce_all
from paceline.compat.horovod.tensorflow.compression import Compression
from paceline.compat.horovod.tensorflow.gradient_aggregation import Accumulator
from paceline.compat.horovod.tensorflow.launch import ALONE_BYTES, bytes_of
from paceline.compat.horovod.tensorflow.names import key, unique_in_graph, variable_names
from paceline.compat.horovod.tensorflow.order import as_written

__all__ = ["Accumulator", "Reduction", "reduce_gradients"]


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The way in which gradients are reduced.

    gradient_predivide_factor: averages are divided by this before the sum, and by the rest of the size after it.
    num_groups: so many groups of gradients, each reduced as one; groups: the same number, or lists of variables.
    sparse_as_dense: tf.IndexedSlices are made dense, and reduced as the others.
    scale_local_gradients: gradients that stay on their rank are divided by the number of ranks.
    prefix: begins the names under which gradients meet those of the other ranks.

    Raises:
        ValueError: what doesn't go together.
    """

    op: int = Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    prefix: str

    def __post_init__(self) -> None:
        if self.op not in ENGINE_NAMES:
            raise ValueError(f"op={self.op!r} is no operation of Horovod's. Give hvd.Average, hvd.Sum or hvd.Adasum.")
        check_predivide(self.gradient_predivide_factor, self.op)
        check_groups(self.num_groups if self.groups is None else self.groups)


@as_written
def reduce_gradients(
    grads: Sequence[Any], variables: Sequence[Any], how: Reduction, local: Collection[Any] = ()
) -> list[Any]:
    """The gradients of the variables, reduced over the ranks: tensors, tf.IndexedSlices or None, as they were given.

    local: variables whose gradients stay on this rank; divided by the number of ranks, unless that is switched off.
    All are submitted before any is waited for. Names are made of the variables' paths or names, so the order may differ
    between ranks. A rank outside the process set keeps its own.

    Raises:
        ValueError: `groups` names a variable that is not among these, or one twice.
        HorovodInternalError: ranks disagree, or one of them is gone.
    """
    given, size = list(grads), len(registered_ranks(how.process_set))
    if len(given) != len(variables):
        raise ValueError(f"{len(given)} gradients were given for {len(variables)} variables: give one for each.")
    result = list(given)
    own = {key(variable) for variable in local}
    shared = [i for i, grad in enumerate(given) if grad is not None and key(variables[i]) not in own]
    if how.scale_local_gradients:
        for i, grad in enumerate(given):
            if grad is not None and key(variables[i]) in own:
                result[i] = _divided(grad, size)
    if how.sparse_as_dense:
        for i in shared:
            result[i] = tf.convert_to_tensor(given[i])
    # A world of one changes nothing; one that may grow is asked each time.
    is_alone = size == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
    if not shared or is_alone or not how.process_set.included():
        return result
    prefix = unique_in_graph(how.prefix)
    # Of all variables, also of those without a gradient here: the number that tells two equal names apart must not depend
    # on it.
    names = [f"{prefix}.{name}" for name in variable_names(variables)]
    asked = _groups(shared, result, variables, how)
    groups = [(f"{prefix}.group.{number}", members) for number, members in enumerate(asked)]
    left = set(shared) - {i for _, members in groups for i in members}
    # By name, for another rank may list its variables in another order, and the members meet by their place.
    groups += _small(sorted(left, key=names.__getitem__), result, variables, names)
    place = {i: number for number, i in enumerate(shared)}
    places = [(name, [place[i] for i in members]) for name, members in groups]
    predivide = how.gradient_predivide_factor
    plan = How(how.op, 1.0 / predivide, predivide, how.process_set)
    # The two factors cancel; rows that are gathered, not summed, have no use for them.
    sparse = How(op=how.op, process_set=how.process_set)
    reduced = reduce_all([result[i] for i in shared], [names[i] for i in shared], plan, how.compression, places, sparse)
    for i, grad in zip(shared, reduced, strict=True):
        result[i] = grad
    return result


def _groups(shared: list[int], grads: list[Any], variables: Sequence[Any], how: Reduction) -> list[list[int]]:
    """The places of the gradients of each group; what is sparse is in none."""
    dense = [i for i in shared if not isinstance(grads[i], tf.IndexedSlices)]
    groups = how.num_groups if how.groups is None else how.groups
    if isinstance(groups, int):
        count = min(groups, len(dense))
        return [dense[part * len(dense) // count : (part + 1) * len(dense) // count] for part in range(count)]
    place = {key(variable): i for i, variable in enumerate(variables)}
    found, seen = [], set()
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
        found.append(members)
    return [members for members in found if members]


def _small(
    places: Sequence[int], grads: list[Any], variables: Sequence[Any], names: Sequence[str]
) -> list[tuple[str, list[int]]]:
    """(name, places) of the gradients that are so small that they are submitted together anyway: by type, one request
    for all of them. The ranks have to have the same ones, so the name tells those of different sets apart."""
    by_type: dict[Any, list[int]] = {}
    for i in places:
        # The variable's, for the shape of a gradient may not be known while a graph is made.
        size = getattr(variables[i], "shape", grads[i].shape)
        is_small = not isinstance(grads[i], tf.IndexedSlices) and bytes_of(size, grads[i].dtype) < ALONE_BYTES
        if is_small:
            by_type.setdefault(grads[i].dtype, []).append(i)
    found = []
    for members in by_type.values():
        if len(members) > 1:
            everyone = "\n".join(names[i] for i in members)
            label = f"{names[members[0]]} and {len(members) - 1} more ({crc32(everyone.encode()):08x})"
            found.append((label, members))
    return found


def _divided(grad: Any, number: int) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / number, grad.indices, grad.dense_shape)
    return grad / number
