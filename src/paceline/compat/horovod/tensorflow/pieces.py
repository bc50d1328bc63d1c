"""The basic collectives, one engine operation each: all-reduce and all-gather, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from paceline.collectives.numbers import Array
from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.handles import as_type, plain
from paceline.compat.horovod.common.ops import Average, Sum
from paceline.compat.horovod.common.process_sets import ProcessSet
from paceline.compat.horovod.common.reduction import How
from paceline.compat.horovod.tensorflow.arrays import Gradient, empty, told_dtype
from paceline.compat.horovod.tensorflow.launch import HorovodInvalidArgumentError, Piece, run
from paceline.compat.horovod.tensorflow.names import unique_in_graph


def reduce_piece(tensors: Sequence[tf.Tensor], name: str | None, how: How, *, grouped: bool) -> Piece:
    """Return an unsubmitted collective (`Piece`) that reduces the tensors over the ranks."""

    def submit(arrays: list[Array]) -> int:
        # Allocate new memory at each run, because the results of the previous run of this graph may still be in use.
        outs = [empty(array.shape, array.dtype) for array in arrays]
        bits, dtypes = [plain(array) for array in arrays], [told_dtype(array) for array in arrays]
        into = {"outs": [plain(out) for out in outs]} if grouped else {"out": plain(outs[0])}
        options = {**into, "dtype": dtypes, **how.engine()}
        return handles.submit_several(
            "allreduce", name, how.process_set, lambda _: outs, bits, options, grouped=grouped
        )

    def backward(grads: Sequence[Gradient], _: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return run([reduce_piece([dense(grad) for grad in grads], gradient_name(name), how, grouped=grouped)])[0]

    kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
    return Piece(tensors=tensors, submit=submit, results=kinds, backward=backward)


def gather_piece(
    tensors: Sequence[tf.Tensor], name: str | None, process_set: ProcessSet, *, grouped: bool = False
) -> Piece:
    """Return an unsubmitted collective (`Piece`) that gathers the tensors from all ranks."""
    if any(tensor.shape.rank == 0 for tensor in tensors):
        raise HorovodInvalidArgumentError(
            message="a tensor without dimensions has no rows to gather; use tf.reshape(tensor, [1])."
        )

    def submit(arrays: list[Array]) -> int:
        bits = [plain(array) for array in arrays]
        return handles.submit_several("allgather", name, process_set, in_types_of(arrays), bits, {}, grouped=grouped)

    def backward(grads: Sequence[Gradient], _: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        base, how = gradient_name(name), How(op=Average, process_set=process_set)
        pieces = []
        for index, (grad, tensor) in enumerate(zip(grads, tensors, strict=True)):
            label = None if base is None else f"{base}.{index}"
            pieces.append(reduce_piece([dense(grad)], label, how, grouped=False))
            pieces.append(gather_piece([tf.shape(tensor)[:1]], None if label is None else f"{label}.rows", process_set))
        results = [result for (result,) in run(pieces)]
        return [
            _own_part(results[2 * index], results[2 * index + 1], tensor, process_set)
            for index, tensor in enumerate(tensors)
        ]

    kinds = [(tensor.dtype, rows_shape(tensor)) for tensor in tensors]
    return Piece(tensors=tensors, submit=submit, results=kinds, backward=backward)


def sparse_pieces(
    slices: tf.IndexedSlices, name: str | None, how: How, decompress: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[list[Piece], Callable[[list[list[tf.Tensor]]], tf.IndexedSlices]]:
    """Return two collectives that gather a sparse tensor, and a function that joins their results."""
    if how.op not in (Average, Sum):
        raise NotImplementedError(
            "a tf.IndexedSlices can be reduced with op=hvd.Average or op=hvd.Sum only; convert it with "
            "tf.convert_to_tensor, or use sparse_as_dense=True."
        )
    if how.prescale != 1.0 or how.postscale != 1.0:
        raise NotImplementedError(
            "prescale_factor and postscale_factor can't be used with a tf.IndexedSlices; convert it with "
            "tf.convert_to_tensor, or use sparse_as_dense=True."
        )
    pieces = [
        gather_piece([part], None if name is None else f"{name}.{what}", how.process_set)
        for what, part in (("values", slices.values), ("indices", slices.indices))
    ]

    def joined(results: list[list[tf.Tensor]]) -> tf.IndexedSlices:
        [gathered], [indices] = results
        values = decompress(gathered)
        if how.op == Average:
            # As in Horovod, averages of sparse integers become floats, while averages of dense integers are truncated.
            values = values / tf.cast(how.process_set.size(), values.dtype)
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    return pieces, joined


def rows_shape(tensor: tf.Tensor) -> tf.TensorShape:
    """Return the tensor's static shape with an unknown first dimension."""
    return tensor.shape if tensor.shape.rank is None else tf.TensorShape([None, *tensor.shape[1:]])


def in_types_of(arrays: Sequence[Array]) -> Callable[[Sequence[Array]], list[Array]]:
    """Return a function that casts outputs back to the dtypes of these arrays."""
    return lambda results: [as_type(result, array) for result, array in zip(results, arrays, strict=True)]


def gradient_name(name: str | None) -> str | None:
    """Return a name for an operation's gradient, or None for an unnamed operation."""
    return None if name is None else unique_in_graph(f"{name}_grad")


def dense(grad: Gradient) -> tf.Tensor:
    """Return the gradient as one dense tensor."""
    return tf.convert_to_tensor(grad)


def _own_part(averaged: tf.Tensor, rows: tf.Tensor, tensor: tf.Tensor, process_set: ProcessSet) -> tf.Tensor:
    """Return this rank's rows of an all-gather's averaged gradient."""
    place = process_set.rank()
    start = tf.reduce_sum(rows[:place])
    part = averaged[start : start + rows[place]]
    part.set_shape(tensor.shape)
    return part
