"""Execution of collectives, eagerly or as operations of a graph, with their order and errors.

In a graph each collective is two operations: one that submits, and one that waits.

    backward pass  ->  gradient 9  ->  submit 9  --.
                       gradient 8  ->  submit 8  ---+->  wait  ->  all results  ->  the optimizer's step
                       gradient 7  ->  submit 7  --'

A submission runs as soon as its tensor is ready, in any order, and communication overlaps the rest of the backward pass. It
does not wait, so it never blocks one of TensorFlow's few threads. A waiting operation starts when this rank has submitted all
of its collectives, and waiting operations run one after the other, in program order. So no rank blocks another by waiting in a
different order. TensorFlow 1 graphs have no such order; there each operation waits in a separate thread.

Both operations are stateful, so TensorFlow neither drops, merges nor precomputes them: all ranks must run the same operations.

Each error is an instance of two classes:

    the ranks disagree, or one has joined      tf.errors.FailedPreconditionError, HorovodInternalError
    a rank is gone                             tf.errors.UnknownError, HorovodInternalError
    an error on this rank only                 tf.errors.InvalidArgumentError, ValueError

A graph calls Python through an operation that knows few error classes: ValueError becomes InvalidArgumentError, and
most other errors UnknownError, whose message begins with the name of the original class. `install` patches the two
functions in which TensorFlow runs graphs, so that they raise the classes in the table.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.eager import context, record
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from paceline.collectives.errors import ArgumentError, ShutDownError
from paceline.collectives.numbers import Array
from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.exceptions import HorovodInternalError
from paceline.compat.horovod.tensorflow.arrays import Gradient, checked, host, tensor_of

#: A tensor of at least this many bytes is submitted separately, when it is ready. Smaller tensors are submitted together,
#: because each call from TensorFlow to Python takes about 40 microseconds.
ALONE_BYTES = 1 << 18

T = TypeVar("T")
P = ParamSpec("P")

_line: tf.Variable | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A collective to run. Inputs and outputs are lists, also for one tensor.

    Attributes:
        tensors: The inputs.
        submit: Submits arrays and returns a handle, whose result is the list of resulting arrays.
        results: Dtype and static shape of each result.
        backward: Returns the inputs' gradients from the results' gradients and the results.
    """

    tensors: Sequence[tf.Tensor]
    submit: Callable[[list[Array]], int]
    results: Sequence[tuple[tf.DType, tf.TensorShape]]
    backward: Callable[[Sequence[Gradient], Sequence[tf.Tensor]], Sequence[Gradient]]


def run(pieces: Sequence[Piece]) -> list[list[tf.Tensor]]:
    """Run the collectives and return each collective's results. Gradients flow through."""
    tensors = [tensor for piece in pieces for tensor in piece.tensors]
    if not tensors:
        results = _results(pieces, [])
    # If no GradientTape records, don't define a gradient, because this takes time.
    elif tf.executing_eagerly() and not record.could_possibly_record():
        results = _results(pieces, tensors)
    else:
        results = _differentiable(pieces, tensors)
    return [results[part] for part in _parts([len(piece.results) for piece in pieces])]


def refuse_xla() -> None:
    """Raise if XLA compiles the graph under construction."""
    if control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()):
        raise NotImplementedError(
            "a horovod operation is used in a function with jit_compile=True, and XLA's programs can't call it. "
            "Use tf.function(jit_compile=False), or model.compile(..., jit_compile=False)."
        )


def bytes_of(shape: tf.TensorShape, dtype: tf.DType) -> float:
    """Return a tensor's size in bytes, or infinity if its shape is unknown."""
    count = tf.TensorShape(shape).num_elements()
    return float("inf") if count is None else count * dtype.size


def _differentiable(pieces: Sequence[Piece], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    def call(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Gradient]]]:
        results = _results(pieces, inputs)

        def gradients(*of_results: Gradient) -> list[Gradient]:
            parts = _parts([len(piece.results) for piece in pieces])
            return [
                grad
                for piece, part in zip(pieces, parts, strict=True)
                for grad in piece.backward(of_results[part], results[part])
            ]

        return results, gradients

    return list(tf.custom_gradient(call)(*tensors))


def _results(pieces: Sequence[Piece], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    of_piece = [list(tensors[part]) for part in _parts([len(piece.tensors) for piece in pieces])]
    if not tf.executing_eagerly():
        return _in_graph(pieces, of_piece)
    with translated():
        submitted = [piece.submit([host(t) for t in own]) for piece, own in zip(pieces, of_piece, strict=True)]
        return [tensor_of(array) for array in _wait(submitted)]


def _in_graph(pieces: Sequence[Piece], tensors: Sequence[list[tf.Tensor]]) -> list[tf.Tensor]:
    # Check this when the graph is built: a program that XLA has compiled can't call Python, and TensorFlow's error is unclear.
    refuse_xla()
    alone = [
        index
        for index, own in enumerate(tensors)
        if sum(bytes_of(tensor.shape, tensor.dtype) for tensor in own) >= ALONE_BYTES
    ]
    together = [index for index in range(len(pieces)) if index not in set(alone)]
    bunches = [[index] for index in alone] + ([together] if together else [])
    order = [index for bunch in bunches for index in bunch]
    before = opened()
    # Place these operations on the CPU, because TensorFlow can't call Python functions on a GPU.
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
        # If the operations have an order (`before`), only one of them waits at a time, so it may block a thread of TensorFlow.
        if before:
            results = tf.numpy_function(_waiter(order), tokens, dtypes, name="HorovodWait")
        else:
            results = _wait_beside(_waiter(order), tokens, dtypes)
    closed(results[0].op)
    # Set the shapes, because TensorFlow does not know the shapes of a Python function's results, but later layers may need them.
    for result, (_, shape) in zip(results, kinds, strict=True):
        result.set_shape(shape)
    return list(results)


def _wait_beside(
    wait: Callable[..., list[Array]], tokens: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> Sequence[tf.Tensor]:
    """Call `wait` in its own thread, within a TensorFlow 1 graph.

    Return the results of `wait(*tokens)` as tensors of `dtypes`. Without the thread, two waiting operations could block
    both threads of a session on a machine with two cores. If other ranks block in the same way, all ranks deadlock.
    """
    waited = tf.data.Dataset.from_tensors(tuple(tokens)).map(
        lambda *inputs: tuple(tf.numpy_function(wait, inputs, dtypes))
    )
    shapes = [tf.TensorShape(None)] * len(dtypes)
    aside = tf.raw_ops.PrivateThreadPoolDataset(
        input_dataset=waited._variant_tensor, num_threads=1, output_types=dtypes, output_shapes=shapes
    )
    results: Sequence[tf.Tensor] = tf.raw_ops.DatasetToSingleElement(
        dataset=aside, output_types=dtypes, output_shapes=shapes, name="HorovodWait"
    )
    return results


def _submitter(pieces: Sequence[Piece], counts: Sequence[int]) -> Callable[..., Array]:
    parts = _parts(counts)

    def submit(*inputs: Array) -> Array:
        with translated():
            arrays = [checked(np.asarray(array)) for array in inputs]
            return np.array([piece.submit(arrays[part]) for piece, part in zip(pieces, parts, strict=True)], np.int64)

    return submit


def _waiter(order: Sequence[int]) -> Callable[..., list[Array]]:
    def wait(*tokens: Array) -> list[Array]:
        submitted = [int(handle) for token in tokens for handle in np.atleast_1d(token)]
        by_piece = dict(zip(order, submitted, strict=True))
        with translated():
            return _wait([by_piece[index] for index in range(len(order))])

    return wait


def _wait(submitted: Sequence[int]) -> list[Array]:
    """Wait for these handles. Return all results in order, or raise the first error."""
    arrays: list[Array] = []
    failure: BaseException | None = None
    # If an operation fails, still wait for the others, because the engine writes to their arrays.
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


def as_written(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that AutoGraph converts neither it nor its callees."""
    written: Callable[P, T] = tf.autograph.experimental.do_not_convert(function)
    return written


def opened() -> list[tf.Operation]:
    """Return the operations that must run before the collectives that are added next."""
    graph = ops.get_default_graph()
    line = _variable() if (getattr(graph, "experimental_acd_manager", None) is not None) else None
    if line is None:
        return []
    stretch = getattr(graph, "_paceline_stretch", None)
    if stretch is None or stretch.is_over():
        stretch = graph._paceline_stretch = _Stretch(graph, line)
    return [stretch.opening]


def closed(waiting: tf.Operation) -> None:
    """Record `waiting` as the operation that waits for the graph's collectives so far."""
    graph = ops.get_default_graph()
    stretch = getattr(graph, "_paceline_stretch", None)
    if stretch is not None:
        stretch.close(waiting)


def run_beside(operation: tf.Operation) -> None:
    """Let TensorFlow run a stateful operation in parallel with other operations."""
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


class _Stretch:
    """Collectives of a graph that may overlap: no function with collectives is called between them."""

    def __init__(self, graph: tf.Graph, line: tf.Variable) -> None:
        self._graph, self._line = graph, line
        self.opening = line.assign_add(0, read_value=False)
        self._own = {self.opening}
        self._seen = len(graph.get_operations())

    def is_over(self) -> bool:
        # Find new operations that read the variable which orders the collectives: they call functions with collectives.
        new = self._graph.get_operations()[self._seen :]
        self._seen += len(new)
        line = self._graph.capture(self._line.handle)
        return any(value is line for operation in new if operation not in self._own for value in operation.inputs)

    def close(self, waiting: tf.Operation) -> None:
        with tf.control_dependencies([waiting]):
            self._own.add(self._line.assign_add(0, read_value=False))


def _variable() -> tf.Variable | None:
    global _line
    with tf.init_scope():
        if _line is None and tf.executing_eagerly():
            # Don't use tf.Variable, because a function can't create a variable when it is traced for the second time.
            with tf.device("/CPU:0"):
                _line = ResourceVariable(0, dtype=tf.int64, trainable=False, name="paceline_order")
        return _line if tf.executing_eagerly() else None


class _Error:
    """Base class of errors with TensorFlow's constructor.

    `node_def` and `op` describe the failed operation of a graph. Eager execution sets both to None.
    """

    _of: ClassVar[type[tf.errors.OpError]]

    def __init__(
        self, node_def: object = None, op: tf.Operation | None = None, message: str = "", *details: object
    ) -> None:
        self._of.__init__(self, node_def, op, message, *details)

    def __str__(self) -> str:
        return str(self._of.__str__(self))  # type: ignore[call-arg]


class HorovodPreconditionError(_Error, HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """An error: the ranks disagree about an operation, or one has called `join`."""

    _of = tf.errors.FailedPreconditionError


class HorovodUnknownError(_Error, HorovodInternalError, tf.errors.UnknownError):  # type: ignore[misc]
    """An error: a rank has died, or communication has failed."""

    _of = tf.errors.UnknownError


class HorovodInvalidArgumentError(_Error, ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """An error: this rank requested an invalid operation."""

    _of = tf.errors.InvalidArgumentError


#: Finds the name of a Python exception class in the message of TensorFlow's UnknownError.
_RAISED = re.compile(rf"\b({HorovodPreconditionError.__name__}|{HorovodUnknownError.__name__}): ")
_CLASSES: dict[str, type[_Error]] = {cls.__name__: cls for cls in (HorovodPreconditionError, HorovodUnknownError)}


@contextmanager
def translated() -> Iterator[None]:
    """Within the block, convert collectives' errors to subclasses of TensorFlow's errors."""
    try:
        yield
    except tf.errors.OpError:
        raise
    except HorovodInternalError as error:
        is_gone = isinstance(error.__cause__, ShutDownError)
        cls = HorovodUnknownError if is_gone else HorovodPreconditionError
        raise cls(None, None, str(error)) from error
    except (ArgumentError, ValueError) as error:
        raise HorovodInvalidArgumentError(None, None, str(error)) from error


def aware(call: Callable[P, T]) -> Callable[P, T]:
    """Wrap TensorFlow's method that runs graphs, to raise Horovod's error classes."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except tf.errors.UnknownError as error:
            own = _own(error)
            if own is error:
                raise
            raise own.with_traceback(error.__traceback__) from None

    return called


def install() -> None:
    """Make TensorFlow's functions and sessions raise this module's error classes."""
    for owner, name in ((context.Context, "call_function"), (session.BaseSession, "_do_call")):
        # A later TensorFlow may lack this method. Then errors in graphs are not converted, and remain UnknownErrors.
        call = getattr(owner, name, None)
        # `functools.wraps` sets `__wrapped__`, so a method with this attribute has already been replaced.
        if call is not None and not hasattr(call, "__wrapped__"):
            setattr(owner, name, aware(call))


def _own(error: tf.errors.OpError) -> tf.errors.OpError:
    raised = None if isinstance(error, HorovodInternalError) else _RAISED.search(error.message)
    if raised is None:
        return error
    return _CLASSES[raised[1]](error.node_def, error.op, error.message)


install()
