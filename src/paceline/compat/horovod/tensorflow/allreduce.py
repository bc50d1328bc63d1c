"""allreduce: alone and in groups, of dense and sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from paceline.compat.horovod.common.ops import Adasum, resolve_op
from paceline.compat.horovod.common.process_sets import ProcessSet, check_adasum, global_process_set
from paceline.compat.horovod.common.reduction import How
from paceline.compat.horovod.tensorflow.compression import Compression
from paceline.compat.horovod.tensorflow.launch import Piece, as_written, run
from paceline.compat.horovod.tensorflow.names import operation_name
from paceline.compat.horovod.tensorflow.pieces import reduce_piece, sparse_pieces


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """A new tensor: this one, reduced over the ranks. Gradients flow through it, reduced the same way.

    tensor: a tf.IndexedSlices becomes one that has the rows of all ranks, its values divided for Average.
    op: hvd.Average unless told. Integers are scaled in float64 and cut toward 0, before the sum and after it.
    prescale_factor, postscale_factor: every rank's is multiplied before, the sum after.
    device_dense, device_sparse: without effect; the ranks meet in the host's memory.

    Raises:
        ValueError: the arguments contradict each other; not initialised; not a member of the process set.
        NotImplementedError: a tf.IndexedSlices with another operation than Average and Sum, or with factors.
        HorovodInternalError: ranks disagree on shape, type or operation (also a tf.errors.FailedPreconditionError), or one
            of them is gone (also a tf.errors.UnknownError); on every rank.
    """
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    [given] = _converted([tensor])
    label = operation_name("Allreduce", name, _values(given), ignore_name_scope)
    return reduce_all([given], [label], how, compression)[0]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """New tensors, reduced together: none begins before all of them are there on every rank.

    tensors: of any types; those that are sparse are reduced as `allreduce` does. An empty list is returned as it is.

    Raises:
        ValueError, NotImplementedError, HorovodInternalError: as `allreduce`.
    """
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    given = _converted(tensors)
    if not given:
        return []
    base = operation_name("GroupedAllreduce", name, _values(given[0]), ignore_name_scope)
    labels = [None if base is None else f"{base}_{index + 1}of{len(given)}" for index in range(len(given))]
    members = [index for index, tensor in enumerate(given) if not isinstance(tensor, tf.IndexedSlices)]
    return reduce_all(given, labels, how, compression, groups=[(base, members)] if members else ())


def reduce_all(
    tensors: Sequence[Any],
    names: Sequence[str | None],
    how: How,
    compression: Any = Compression.none,
    groups: Sequence[tuple[str | None, Sequence[int]]] = (),
    sparse: How | None = None,
) -> list[Any]:
    """Reduce each tensor, dense or sparse; all are under way before any is waited for.

    sparse: how sparse ones are reduced, where that is another way.
    groups: (name, places in `tensors`) of those that begin together; dense ones.
    """
    if how.op == Adasum:
        check_adasum(how.process_set)
    pieces: list[Piece] = []
    # What makes each tensor's result of those of all pieces, and what its compression has to know.
    finishes: dict[int, Callable[[list[list[Any]]], Any]] = {}
    contexts: dict[int, Any] = {}
    dense: dict[int, Any] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            values, contexts[index] = compression.compress(tensor.values)
            sent = tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
            undo = partial(_undone, compression, contexts[index])
            two, joined = sparse_pieces(sent, names[index], sparse or how, undo)
            finishes[index] = partial(_sparse, joined, len(pieces))
            pieces += two
        else:
            dense[index], contexts[index] = compression.compress(tensor)
    grouped = {index for _, members in groups for index in members}
    alone = [(names[index], [index]) for index in dense if index not in grouped]
    for name, members in [*alone, *groups]:
        for place, index in enumerate(members):
            finishes[index] = partial(_dense, len(pieces), place, compression, contexts[index])
        is_group = any(index in grouped for index in members)
        pieces.append(reduce_piece([dense[index] for index in members], name, how, grouped=is_group))
    results = run(pieces)
    return [finishes[index](results) for index in range(len(tensors))]


def _converted(tensors: Sequence[Any]) -> list[Any]:
    return [tensor if isinstance(tensor, tf.IndexedSlices) else tf.convert_to_tensor(tensor) for tensor in tensors]


def _values(tensor: Any) -> Any:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor


def _dense(piece: int, place: int, compression: Any, ctx: Any, results: list[list[Any]]) -> Any:
    return compression.decompress(results[piece][place], ctx)


def _undone(compression: Any, ctx: Any, values: Any) -> Any:
    return compression.decompress(values, ctx)


def _sparse(joined: Any, piece: int, results: list[list[Any]]) -> Any:
    return joined(results[piece : piece + 2])
