"""The collectives that the others are made of, one engine operation each: allreduce and allgather, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.arrays import plain
from paceline.compat.horovod.common.ops import ENGINE_NAMES, Adasum, Average, Sum
from paceline.compat.horovod.common.process_sets import (
    ProcessSet,
    check_adasum,
    global_process_set,
    registered_number,
)
from paceline.compat.horovod.tensorflow.arrays import Array, empty, told_dtype
from paceline.compat.horovod.tensorflow.errors import HorovodInvalidArgumentError
from paceline.compat.horovod.tensorflow.launch import Piece, run
from paceline.compat.horovod.tensorflow.names import unique_in_graph


@dataclass(frozen=True, kw_only=True)
class How:
    """The way in which tensors are reduced."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        if self.op == Adasum:
            check_adasum(self.process_set)

    def engine(self) -> dict[str, Any]:
        return {
            "op": ENGINE_NAMES[self.op],
            "prescale": float(self.prescale),
            "postscale": float(self.postscale),
            "process_set": registered_number(self.process_set),
        }


def reduce_piece(tensors: Sequence[Any], name: str | None, how: How, *, grouped: bool) -> Piece:
    """The allreduce of one tensor, or of several as a group: none begins before all of them are there everywhere."""

    def submit(arrays: list[Array]) -> int:
        # New memory for each run: the results of the last run of this graph may still be in use.
        outs = [empty(array.shape, array.dtype) for array in arrays]
        bits, dtypes = [plain(array) for array in arrays], [told_dtype(array) for array in arrays]
        into = [plain(out) for out in outs]

        def start(engine: Any, full: str) -> Any:
            if grouped:
                return engine.grouped_allreduce(full, bits, outs=into, dtype=dtypes, **how.engine())
            return engine.allreduce(full, bits[0], out=into[0], dtype=dtypes[0], **how.engine())

        kind = "grouped_allreduce" if grouped else "allreduce"
        return handles.submit(kind, name, how.process_set, start, lambda _: outs)

    def backward(grads: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
        return run([reduce_piece([dense(grad) for grad in grads], gradient_name(name), how, grouped=grouped)])[0]

    kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
    return Piece(tensors=tensors, submit=submit, results=kinds, backward=backward)


def gather_piece(tensors: Any, name: str | None, process_set: ProcessSet) -> Piece:
    """The allgather of one tensor, or of a list of them as a group."""
    grouped = isinstance(tensors, list)
    given = tensors if grouped else [tensors]
    if any(tensor.shape.rank == 0 for tensor in given):
        raise HorovodInvalidArgumentError(
            message="a tensor without dimensions has no rows to gather; use tf.reshape(tensor, [1])."
        )

    def submit(arrays: list[Array]) -> int:
        bits = [plain(array) for array in arrays]

        def start(engine: Any, full: str) -> Any:
            number = registered_number(process_set)
            if grouped:
                return engine.grouped_allgather(full, bits, process_set=number)
            return engine.allgather(full, bits[0], process_set=number)

        def finish(results: Any) -> list[Array]:
            found = results if grouped else [results]
            return [result.view(array.dtype) for result, array in zip(found, arrays, strict=True)]

        return handles.submit("grouped_allgather" if grouped else "allgather", name, process_set, start, finish)

    def backward(grads: Sequence[Any], _: Sequence[Any]) -> list[Any]:
        base, how = gradient_name(name), How(op=Average, process_set=process_set)
        pieces = []
        for index, (grad, tensor) in enumerate(zip(grads, given, strict=True)):
            label = None if base is None else f"{base}.{index}"
            pieces.append(reduce_piece([dense(grad)], label, how, grouped=False))
            # How many rows each rank has; in a graph that is known only when it runs.
            pieces.append(gather_piece(tf.shape(tensor)[:1], None if label is None else f"{label}.rows", process_set))
        results = [result for (result,) in run(pieces)]
        return [
            _own_part(results[2 * index], results[2 * index + 1], tensor, process_set)
            for index, tensor in enumerate(given)
        ]

    kinds = [
        (tensor.dtype, tensor.shape if tensor.shape.rank is None else tf.TensorShape([None, *tensor.shape[1:]]))
        for tensor in given
    ]
    return Piece(tensors=given, submit=submit, results=kinds, backward=backward)


def sparse_pieces(
    slices: tf.IndexedSlices, name: str | None, how: How, decompress: Callable[[Any], Any]
) -> tuple[list[Piece], Callable[[list[list[Any]]], Any]]:
    """The two allgathers of a sparse tensor, and what makes the reduced one of their results.

    decompress: undoes what was done to the values; before they are divided.

    Raises:
        NotImplementedError: it is to be reduced otherwise than by Average or Sum, or with factors.
    """
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
        gather_piece(part, None if name is None else f"{name}.{what}", how.process_set)
        for what, part in (("values", slices.values), ("indices", slices.indices))
    ]

    def joined(results: list[list[Any]]) -> Any:
        [gathered], [indices] = results
        values = decompress(gathered)
        if how.op == Average:
            # Integers become floating-point numbers here, as in Horovod, though those of dense tensors are cut off.
            values = values / tf.cast(how.process_set.size(), values.dtype)
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    return pieces, joined


def gradient_name(name: str | None) -> str | None:
    """The name of what runs in the backward pass of an operation."""
    return None if name is None else unique_in_graph(f"{name}_grad")


def dense(grad: Any) -> Any:
    """The gradient as one tensor."""
    return tf.convert_to_tensor(grad)


def _own_part(averaged: Any, rows: Any, tensor: Any, process_set: ProcessSet) -> Any:
    """This rank's rows of a gradient of everyone's. rows: how many each rank has."""
    place = process_set.rank()
    start = tf.reduce_sum(rows[:place])
    part = averaged[start : start + rows[place]]
    part.set_shape(tensor.shape)
    return part
