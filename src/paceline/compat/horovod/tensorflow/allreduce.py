"""All-reduce of dense and sparse tensors, single and grouped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import tensorflow as tf

from paceline.compat.horovod.common.ops import Adasum, resolve_op
from paceline.compat.horovod.common.process_sets import ProcessSet, check_adasum, global_process_set
from paceline.compat.horovod.common.reduction import Compressor, How
from paceline.compat.horovod.tensorflow.compression import Compression
from paceline.compat.horovod.tensorflow.launch import Piece, as_written, run
from paceline.compat.horovod.tensorflow.names import operation_name
from paceline.compat.horovod.tensorflow.pieces import reduce_piece, sparse_pieces


@as_written
def allreduce(
    tensor: tf.Tensor | tf.IndexedSlices,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """Reduce the tensor over the ranks into a new tensor.

    Gradients flow through the operation, and are reduced in the same way. `op` is hvd.Average by default.
    `prescale_factor` multiplies every rank's tensor before the sum, `postscale_factor` the sum. Integers are scaled in
    float64 and truncated towards 0, before and after the sum. A tf.IndexedSlices becomes a tf.IndexedSlices with the
    rows of all ranks; Average divides the rows' values by the number of ranks. device_dense and device_sparse have no
    effect, because the reduction runs in host memory.

    Raises:
        ValueError: The arguments contradict each other, Horovod is not initialized, or this rank is not in the process set.
        NotImplementedError: A tf.IndexedSlices can't be reduced with factors, or with an `op` other than Average and Sum.
        HorovodInternalError: The ranks disagree on shape, type or operation (also a tf.errors.FailedPreconditionError), or a
            rank has died (also a tf.errors.UnknownError). Every rank raises this error.
    """
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    [converted] = _converted([tensor])
    label = operation_name("Allreduce", name, _values(converted), ignore_name_scope)
    return reduce_all([converted], [label], how, compression)[0]


@as_written
def grouped_allreduce(
    tensors: Sequence[tf.Tensor | tf.IndexedSlices],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduce tensors as one operation, once all are ready on all ranks.

    The tensors' types may differ. Sparse tensors are reduced as in `allreduce`. An empty list returns an empty list.

    This function raises the errors of `allreduce`.
    """
    how = How(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    converted = _converted(tensors)
    if not converted:
        return []
    base = operation_name("GroupedAllreduce", name, _values(converted[0]), ignore_name_scope)
    labels = [None if base is None else f"{base}_{index + 1}of{len(converted)}" for index in range(len(converted))]
    members = [index for index, tensor in enumerate(converted) if not isinstance(tensor, tf.IndexedSlices)]
    return reduce_all(converted, labels, how, compression, groups=[(base, members)] if members else ())


def reduce_all(
    tensors: Sequence[tf.Tensor | tf.IndexedSlices],
    names: Sequence[str | None],
    how: How,
    compression: type[Compressor] = Compression.none,
    groups: Sequence[tuple[str | None, Sequence[int]]] = (),
    sparse: How | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduce each tensor; submit all of them before waiting for the first.

    `how` has the operation, factors and process set. For sparse tensors, `sparse` replaces `how` if not None. `groups`
    holds (name, positions in `tensors`) of dense tensors that are reduced together.
    """
    if how.op == Adasum:
        check_adasum(how.process_set)
    pieces: list[Piece] = []
    # `finishes`: index of a tensor -> function that converts the results of all pieces. `contexts`: data of the compression.
    finishes: dict[int, Callable[[list[list[tf.Tensor]]], tf.Tensor | tf.IndexedSlices]] = {}
    contexts: dict[int, object] = {}
    dense: dict[int, tf.Tensor] = {}
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


def _converted(tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
    return [tensor if isinstance(tensor, tf.IndexedSlices) else tf.convert_to_tensor(tensor) for tensor in tensors]


def _values(tensor: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor


def _dense(
    piece: int, place: int, compression: type[Compressor], ctx: object, results: list[list[tf.Tensor]]
) -> tf.Tensor:
    return compression.decompress(results[piece][place], ctx)


def _undone(compression: type[Compressor], ctx: object, values: tf.Tensor) -> tf.Tensor:
    return compression.decompress(values, ctx)


def _sparse(
    joined: Callable[[list[list[tf.Tensor]]], tf.IndexedSlices], piece: int, results: list[list[tf.Tensor]]
) -> tf.IndexedSlices:
    return joined(results[piece : piece + 2])
