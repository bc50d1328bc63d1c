"""Broadcast into new tensors and into variables, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from paceline.collectives.numbers import Array
from paceline.compat.horovod.common import basics, handles
from paceline.compat.horovod.common.handles import plain
from paceline.compat.horovod.common.ops import Average
from paceline.compat.horovod.common.process_sets import ProcessSet, check_root, global_process_set
from paceline.compat.horovod.common.reduction import How
from paceline.compat.horovod.tensorflow.arrays import Gradient, empty
from paceline.compat.horovod.tensorflow.launch import Piece, as_written, run
from paceline.compat.horovod.tensorflow.names import operation_name, raw, unique_in_graph, variable_names
from paceline.compat.horovod.tensorflow.pieces import dense, gradient_name, reduce_piece


@as_written
def broadcast(
    tensor: tf.Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return a new tensor with the values of `root_rank`.

    `root_rank` is a world rank even within a process set. As in Horovod, the gradient on the root is the average over
    the ranks, and the gradient on other ranks is 0.

    Raises:
        ValueError: `root_rank` is not in the process set.
        HorovodInternalError: Shapes, types or roots differ between ranks. Every rank raises this error.
    """
    converted = tf.convert_to_tensor(tensor)
    label = operation_name("Broadcast", name, converted, ignore_name_scope)
    return run([broadcast_piece(converted, root_rank, label, process_set)])[0][0]


@as_written
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Set the variables to the values of `root_rank`, and return their values.

    `variables` are TensorFlow's or Keras's. If the ranks' variables or their order differ, raise HorovodInternalError.
    """
    listed = list(variables)
    if not listed:
        return []
    for variable in listed:
        if not hasattr(raw(variable), "assign"):
            raise ValueError(
                f"this takes variables, not a tensor ({variable!r}). Use hvd.broadcast(tensor, root_rank), which gives a new one."
            )
    base = unique_in_graph(name or "broadcast_variables")
    held = [tf.convert_to_tensor(raw(variable)) for variable in listed]
    pieces = [
        broadcast_piece(tensor, root_rank, f"{base}.{label}", process_set)
        for tensor, label in zip(held, variable_names(listed), strict=True)
    ]
    results = [result for (result,) in run(pieces)]
    return [_assigned(raw(variable), result) for variable, result in zip(listed, results, strict=True)]


def broadcast_piece(tensor: tf.Tensor, root: int, name: str | None, process_set: ProcessSet) -> Piece:
    """Return an unsubmitted collective (`Piece`) that broadcasts one tensor.

    Raises:
        ValueError: `root` is not in the process set.
    """
    check_root(root, process_set)

    def submit(arrays: list[Array]) -> int:
        [array] = arrays
        out = empty(array.shape, array.dtype)
        return handles.submit(
            "broadcast", name, process_set, lambda _: [out], plain(array), {"root": root, "out": plain(out)}
        )

    def backward(grads: Sequence[Gradient], _: Sequence[tf.Tensor]) -> list[Gradient]:
        how = How(op=Average, process_set=process_set)
        averaged = run([reduce_piece([dense(grads[0])], gradient_name(name), how, grouped=False)])[0][0]
        # TensorFlow 1 drops operations without a use. Other ranks must keep the all-reduce, because the root waits for it.
        with tf.control_dependencies([averaged]):
            return [averaged if basics.rank() == root else tf.zeros_like(averaged)]

    return Piece(tensors=[tensor], submit=submit, results=[(tensor.dtype, tensor.shape)], backward=backward)


def _assigned(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
    """Assign the value, and return the variable's value afterwards."""
    if tf.executing_eagerly() or hasattr(variable, "handle"):
        done = variable.assign(value)
        with tf.control_dependencies([] if tf.executing_eagerly() else [done]):
            return tf.identity(variable)
    return tf.compat.v1.assign(variable, value)
