"""Order among the collectives of graphs: enough of it that names never meet the wrong ones, and no more.

Within one graph each operation has a name of its own, so they may go on side by side. But a function may be called twice
in another one, and TensorFlow puts the bodies of both calls into one program: the same names twice, at the same time.

So there is a variable that nothing is ever added to. Whoever writes to a variable comes after whoever has before, in the
order of the program, through calls, branches and the rounds of a loop: TensorFlow sees to that.

    open    writes to it; everything that is submitted in this graph comes after it
    close   writes to it, after a waiting operation
    a call of a function that has collectives, too: it writes to the variable, so it comes after all that was closed,
            and what is submitted after it in this graph is opened anew
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

F = TypeVar("F", bound=Callable[..., Any])

_line: Any = None


def as_written(function: F) -> F:
    """The function, which AutoGraph is to leave as it is; what it calls, too."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def opened() -> list[Any]:
    """The operations that have to run before a submission in the graph that is being made."""
    graph = ops.get_default_graph()
    line = _variable() if _is_ordered(graph) else None
    if line is None:
        return []
    stretch = getattr(graph, "_paceline_stretch", None)
    if stretch is None or stretch.is_over():
        stretch = graph._paceline_stretch = _Stretch(graph, line)
    return [stretch.opening]


def closed(waiting: Any) -> None:
    """Tell that a waiting operation was put into the graph; `opened` was called before."""
    graph = ops.get_default_graph()
    stretch = getattr(graph, "_paceline_stretch", None)
    if stretch is not None:
        stretch.close(waiting)


def run_beside(operation: Any) -> None:
    """Let a stateful operation run beside the others, not after those that come before it in the program."""
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


class _Stretch:
    """Collectives of a graph between which it calls no function that has some, too."""

    def __init__(self, graph: Any, line: Any) -> None:
        self._graph, self._line = graph, line
        self.opening = line.assign_add(0, read_value=False)
        self._own = {self.opening}
        self._seen = len(graph.get_operations())

    def is_over(self) -> bool:
        # A call of a function that writes to the variable has it among its inputs: that is how it is noticed.
        new = self._graph.get_operations()[self._seen :]
        self._seen += len(new)
        line = self._graph.capture(self._line.handle)
        return any(given is line for operation in new if operation not in self._own for given in operation.inputs)

    def close(self, waiting: Any) -> None:
        with tf.control_dependencies([waiting]):
            self._own.add(self._line.assign_add(0, read_value=False))


def _is_ordered(graph: Any) -> bool:
    """True if TensorFlow keeps the order of writes in this graph: it does in those of tf.function."""
    return getattr(graph, "experimental_acd_manager", None) is not None


def _variable() -> Any:
    global _line
    with tf.init_scope():
        if _line is None and tf.executing_eagerly():
            # Not tf.Variable: a function may be traced for the second time, and does not allow one of those to be made then.
            with tf.device("/CPU:0"):
                _line = ResourceVariable(0, dtype=tf.int64, trainable=False, name="paceline_order")
        return _line if tf.executing_eagerly() else None
