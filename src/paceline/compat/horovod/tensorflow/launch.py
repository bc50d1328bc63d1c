"""Runs collectives: at once on eager tensors, or as operations of a graph.

In a graph each collective is two operations: one that submits, and one that waits.

    backward pass  ->  gradient 9  ->  submit 9  --\
                       gradient 8  ->  submit 8  ---+->  wait  ->  all results  ->  the optimizer's step
                       gradient 7  ->  submit 7  --/

A submission runs as soon as its tensor is there, in whatever order: the engine does not mind, and communication goes on
behind the rest of the backward pass. It returns at once, so it never blocks one of TensorFlow's few threads. The waiting
operation starts when everything that it waits for has been submitted on this rank, and waiting operations run one after
the other, in the order of the program. So no rank can hold up another by waiting for the wrong thing first. Graphs of
TensorFlow 1 have no such order; there each waits in a thread of its own.

Both are stateful, so that TensorFlow neither drops nor merges nor precomputes them: every rank has to do the same ones.
What order there is among several of them, `order` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.tensorflow.arrays import Array, checked, host, tensor_of
from paceline.compat.horovod.tensorflow.errors import translated
from paceline.compat.horovod.tensorflow.order import closed, opened, run_beside

#: A tensor of this size is submitted alone, as soon as it is there; smaller ones share a call from TensorFlow to Python,
#: which costs about 40 microseconds.
ALONE_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One collective. What it takes and gives is a list, also where there is one tensor.

    submit: its handle; whose result is the list of the resulting arrays.
    results: type and static shape of each result.
    backward: the gradients of the tensors, of those of the results, and the results.
    """

    tensors: Sequence[Any]
    submit: Callable[[list[Array]], int]
    results: Sequence[tuple[tf.DType, tf.TensorShape]]
    backward: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def run(pieces: Sequence[Piece]) -> list[list[Any]]:
    """The results of each piece. All of them are submitted before any is waited for. Gradients flow through.

    Raises:
        HorovodInternalError: ranks disagree (also a tf.errors.FailedPreconditionError), or one of them is gone (also a
            tf.errors.UnknownError); see `errors`.
        ValueError: what can't be right on this rank; also a tf.errors.InvalidArgumentError. Out of a graph only that.
    """
    tensors = [tensor for piece in pieces for tensor in piece.tensors]
    if not tensors:
        results = _results(pieces, [])
    # Where no tape records, there is no gradient to define, and the call is cheaper.
    elif tf.executing_eagerly() and not record.could_possibly_record():
        results = _results(pieces, tensors)
    else:
        results = _differentiable(pieces, tensors)
    return [results[part] for part in _parts([len(piece.results) for piece in pieces])]


def refuse_xla() -> None:
    """Raise where the graph that is being made is to be compiled by XLA.

    Raises:
        NotImplementedError: it is.
    """
    if control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()):
        raise NotImplementedError(
            "a horovod operation is used in a function with jit_compile=True, and XLA's programs can't call it. "
            "Use tf.function(jit_compile=False), or model.compile(..., jit_compile=False)."
        )


def bytes_of(shape: Any, dtype: tf.DType) -> float:
    """The number of bytes of a tensor; infinity where its shape isn't known."""
    count = tf.TensorShape(shape).num_elements()
    return float("inf") if count is None else count * dtype.size


def _differentiable(pieces: Sequence[Piece], tensors: Sequence[Any]) -> list[Any]:
    def call(*given: Any) -> Any:
        results = _results(pieces, given)

        def gradients(*of_results: Any) -> list[Any]:
            parts = _parts([len(piece.results) for piece in pieces])
            return [
                grad
                for piece, part in zip(pieces, parts, strict=True)
                for grad in piece.backward(of_results[part], results[part])
            ]

        return results, gradients

    return list(tf.custom_gradient(call)(*tensors))


def _results(pieces: Sequence[Piece], tensors: Sequence[Any]) -> list[Any]:
    of_piece = [list(tensors[part]) for part in _parts([len(piece.tensors) for piece in pieces])]
    if not tf.executing_eagerly():
        return _in_graph(pieces, of_piece)
    with translated():
        submitted = [piece.submit([host(t) for t in own]) for piece, own in zip(pieces, of_piece, strict=True)]
        return [tensor_of(array) for array in _wait(submitted)]


def _in_graph(pieces: Sequence[Piece], tensors: Sequence[list[Any]]) -> list[Any]:
    # Now, while the graph is made: a program that XLA has compiled can't call Python, and fails without a word of why.
    refuse_xla()
    alone = [
        index
        for index, own in enumerate(tensors)
        if sum(bytes_of(tensor.shape, tensor.dtype) for tensor in own) >= ALONE_BYTES
    ]
    together = [index for index in range(len(pieces)) if index not in set(alone)]
    bunches = [[index] for index in alone] + ([together] if together else [])
    # Where in the bunches' handles that of each piece will be found.
    order = [index for bunch in bunches for index in bunch]
    before = opened()
    # On the CPU, where Python is: on a GPU TensorFlow would have no kernel for these.
    with tf.device("/CPU:0"), tf.control_dependencies(before):
        tokens = []
        for bunch in bunches:
            counts = [len(tensors[index]) for index in bunch]
            token = tf.numpy_function(
                _submitter([pieces[index] for index in bunch], counts),
                [tensor for index in bunch for tensor in tensors[index]],
                tf.int64,
                name="HorovodSubmit",
            )
            run_beside(token.op)
            tokens.append(token)
        kinds = [result for piece in pieces for result in piece.results]
        dtypes = [dtype for dtype, _ in kinds]
        # With an order, waiting operations come one after the other, and one thread of TensorFlow's is enough for them.
        if before:
            results = tf.numpy_function(_waiter(order), tokens, dtypes, name="HorovodWait")
        else:
            results = _wait_beside(_waiter(order), tokens, dtypes)
    closed(results[0].op)
    # What comes back from Python has no shape; layers that follow may want one while the graph is made.
    for result, (_, shape) in zip(results, kinds, strict=True):
        result.set_shape(shape)
    return list(results)


def _wait_beside(wait: Callable[..., list[Array]], tokens: Sequence[Any], dtypes: Sequence[tf.DType]) -> Sequence[Any]:
    """The results of `wait`, which is called in a thread of its own.

    Nothing orders the waiting operations of a TensorFlow 1 graph. Two of them would take both of a session's threads on
    a machine with two cores, and other two those of another rank, for ever. The operations of tf.data return at once.
    """
    asked = tf.data.Dataset.from_tensors(tuple(tokens)).map(
        lambda *given: tuple(tf.numpy_function(wait, given, dtypes))
    )
    shapes = [tf.TensorShape(None)] * len(dtypes)
    aside = tf.raw_ops.PrivateThreadPoolDataset(
        input_dataset=asked._variant_tensor, num_threads=1, output_types=dtypes, output_shapes=shapes
    )
    results: Sequence[Any] = tf.raw_ops.DatasetToSingleElement(
        dataset=aside, output_types=dtypes, output_shapes=shapes, name="HorovodWait"
    )
    return results


def _submitter(pieces: Sequence[Piece], counts: Sequence[int]) -> Callable[..., Array]:
    parts = _parts(counts)

    def submit(*given: Any) -> Array:
        with translated():
            arrays = [checked(np.asarray(array)) for array in given]
            return np.array([piece.submit(arrays[part]) for piece, part in zip(pieces, parts, strict=True)], np.int64)

    return submit


def _waiter(order: Sequence[int]) -> Callable[..., list[Array]]:
    def wait(*tokens: Any) -> list[Array]:
        found = [int(handle) for token in tokens for handle in np.atleast_1d(token)]
        by_piece = dict(zip(order, found, strict=True))
        with translated():
            return _wait([by_piece[index] for index in range(len(order))])

    return wait


def _wait(submitted: Sequence[int]) -> list[Array]:
    """The results of all of them, one after the other. An error is raised when none is in flight any more."""
    arrays: list[Array] = []
    failure: BaseException | None = None
    # All are waited for, also after an error: the engine writes into the arrays of those that go on.
    for handle in submitted:
        try:
            arrays += handles.synchronize(handle)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return arrays


def _parts(counts: Sequence[int]) -> list[slice]:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
