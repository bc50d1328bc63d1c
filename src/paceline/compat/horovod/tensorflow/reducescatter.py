"""Reduce-scatter, single and grouped, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from paceline.collectives.numbers import Array
from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.handles import plain
from paceline.compat.horovod.common.ops import Average, Sum
from paceline.compat.horovod.common.process_sets import ProcessSet, checked_members, global_process_set
from paceline.compat.horovod.common.reduction import Compressor, How
from paceline.compat.horovod.tensorflow.arrays import Gradient, told_dtype
from paceline.compat.horovod.tensorflow.compression import Compression
from paceline.compat.horovod.tensorflow.launch import HorovodPreconditionError, Piece, as_written, run
from paceline.compat.horovod.tensorflow.names import operation_name
from paceline.compat.horovod.tensorflow.pieces import dense, gather_piece, gradient_name, in_types_of, rows_shape


@as_written
def reducescatter(
    tensor: tf.Tensor,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Return this rank's share of the reduced tensor's rows.

    If the rows do not divide evenly, each of the first ranks gets one row more. The gradient is the concatenation of
    the ranks' gradients. As in Horovod, Sum multiplies this gradient by the number of ranks.

    Raises:
        HorovodInternalError: `op` is neither Average nor Sum, the tensor has no dimension, or the ranks disagree.
    """
    converted = tf.convert_to_tensor(tensor)
    label = operation_name("Reducescatter", name, converted, ignore_name_scope)
    how = _how(op, prescale_factor, postscale_factor, process_set)
    return _scattered([converted], compression, label, how, grouped=False)[0]


@as_written
def grouped_reducescatter(
    tensors: Sequence[tf.Tensor],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduce and scatter each tensor like `reducescatter`, as one operation."""
    converted = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not converted:
        return []
    label = operation_name("GroupedReducescatter", name, converted[0], ignore_name_scope)
    how = _how(op, prescale_factor, postscale_factor, process_set)
    return _scattered(converted, compression, label, how, grouped=True)


def _how(op: int, prescale: float, postscale: float, process_set: ProcessSet) -> How:
    if op not in (Average, Sum):
        raise HorovodPreconditionError(message="Reducescatter currently only supports AVERAGE and SUM.")
    return How(op, prescale, postscale, process_set)


def _scattered(
    tensors: Sequence[tf.Tensor], compression: type[Compressor], name: str | None, how: How, *, grouped: bool
) -> list[tf.Tensor]:
    compressed = [compression.compress(tensor) for tensor in tensors]
    results = run([_scatter_piece([tensor for tensor, _ in compressed], name, how, grouped=grouped)])[0]
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, compressed, strict=True)]


def _scatter_piece(tensors: Sequence[tf.Tensor], name: str | None, how: How, *, grouped: bool) -> Piece:
    if any(tensor.shape.rank == 0 for tensor in tensors):
        raise HorovodPreconditionError(
            message="Reducescatter of a rank-zero tensor: it has no rows to share; use tf.reshape(tensor, [1])."
        )

    def submit(arrays: list[Array]) -> int:
        bits, finish = [plain(array) for array in arrays], in_types_of(arrays)
        options = {"dtype": [told_dtype(array) for array in arrays], **how.engine()}
        return handles.submit_several("reducescatter", name, how.process_set, finish, bits, options, grouped=grouped)

    def backward(grads: Sequence[Gradient], _: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        scale = how.prescale * how.postscale * (len(checked_members(how.process_set)) if how.op == Sum else 1)
        sent = [dense(grad) for grad in grads]
        if scale != 1:
            sent = [grad * tf.cast(scale, grad.dtype) for grad in sent]
        gathered = run([gather_piece(sent, gradient_name(name), how.process_set, grouped=True)])[0]
        for grad, tensor in zip(gathered, tensors, strict=True):
            if not tf.executing_eagerly():
                grad.set_shape(tensor.shape)
        return gathered

    kinds = [(tensor.dtype, rows_shape(tensor)) for tensor in tensors]
    return Piece(tensors=tensors, submit=submit, results=kinds, backward=backward)
