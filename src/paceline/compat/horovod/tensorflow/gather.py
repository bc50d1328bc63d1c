"""All-gather and all-to-all, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from paceline.collectives.numbers import Array
from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.handles import plain
from paceline.compat.horovod.common.ops import check_splits, equal_splits
from paceline.compat.horovod.common.process_sets import ProcessSet, checked_members, global_process_set
from paceline.compat.horovod.tensorflow.arrays import Gradient
from paceline.compat.horovod.tensorflow.launch import HorovodInvalidArgumentError, Piece, as_written, run
from paceline.compat.horovod.tensorflow.names import operation_name
from paceline.compat.horovod.tensorflow.pieces import dense, gather_piece, gradient_name, rows_shape


@as_written
def allgather(
    tensor: tf.Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order.

    The first dimension may differ between ranks and may be 0; other dimensions must be equal. As in Horovod, the
    gradient of this rank's part is the average over the ranks, not the sum.

    Raises:
        ValueError: The tensor has no dimension.
    """
    converted = tf.convert_to_tensor(tensor)
    return run(
        [gather_piece([converted], operation_name("Allgather", name, converted, ignore_name_scope), process_set)]
    )[0][0]


@as_written
def grouped_allgather(
    tensors: Sequence[tf.Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather each tensor like `allgather`, as one operation. Return [] for an empty list."""
    converted = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not converted:
        return []
    full = operation_name("GroupedAllgather", name, converted[0], ignore_name_scope)
    return run([gather_piece(converted, full, process_set, grouped=True)])[0]


@as_written
def alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Return the rows that every rank sent to this rank.

    `splits` (a list or int32 tensor) has the number of rows for each rank, from the first row on. Rows beyond the sum
    are not sent. None means equal parts. With `splits` the result is (tensor, received_splits), else one tensor.

    Raises:
        ValueError: The splits have another type or do not fit the tensor. Without splits: the rows do not divide equally.
    """
    converted = tf.convert_to_tensor(tensor)
    counts = None if splits is None else _splits_tensor(splits)
    piece = _alltoall_piece(
        converted, counts, operation_name("Alltoall", name, converted, ignore_name_scope), process_set
    )
    received, received_splits = run([piece])[0]
    return received if splits is None else (received, received_splits)


def _alltoall_piece(tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None, process_set: ProcessSet) -> Piece:
    if tensor.shape.rank == 0:
        raise HorovodInvalidArgumentError(
            message="a tensor without dimensions has no rows to send; use tf.reshape(tensor, [1])."
        )
    inputs = [tensor] if splits is None else [tensor, splits]

    def submit(arrays: list[Array]) -> int:
        array, size = arrays[0], len(checked_members(process_set))
        counts = equal_splits(array.shape[0], size) if splits is None else [int(count) for count in arrays[1]]
        check_splits(counts, array.shape[0], size)

        def finish(result: tuple[Array, Sequence[int]]) -> list[Array]:
            rows, row_counts = result
            # The engine only moves the bits of bfloat16 numbers, so restore the dtype of the rows.
            return [rows.view(array.dtype), np.array([int(count) for count in row_counts], np.int32)]

        return handles.submit("alltoall", name, process_set, finish, plain(array), {"splits": counts})

    def backward(grads: Sequence[Gradient], results: Sequence[tf.Tensor]) -> list[Gradient]:
        piece = _alltoall_piece(dense(grads[0]), results[1], gradient_name(name), process_set)
        returned = run([piece])[0][0]
        # The result does not depend on rows that were not sent, so the gradient of these rows is 0.
        unsent = tf.shape(tensor)[:1] - tf.shape(returned)[:1]
        zeros = tf.zeros(tf.concat([unsent, tf.shape(tensor)[1:]], 0), returned.dtype)
        grad = tf.concat([returned, zeros], 0)
        grad.set_shape(tensor.shape)
        return [grad] if splits is None else [grad, None]

    return Piece(
        tensors=inputs,
        submit=submit,
        results=[(tensor.dtype, rows_shape(tensor)), (tf.int32, tf.TensorShape([None]))],
        backward=backward,
    )


def _splits_tensor(splits: tf.Tensor | Sequence[int]) -> tf.Tensor:
    counts: tf.Tensor = splits
    if not tf.is_tensor(splits):
        counts = tf.convert_to_tensor([int(count) for count in splits], tf.int32)
    if counts.dtype != tf.int32 or counts.shape.rank not in (1, None):
        raise HorovodInvalidArgumentError(
            message=f"splits must be a one-dimensional tensor of tf.int32, not {counts.dtype.name} with the shape "
            f"{counts.shape}; or a list."
        )
    return counts
