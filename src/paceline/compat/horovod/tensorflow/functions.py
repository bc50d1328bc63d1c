"""Making every rank start from the same: variables, any object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from paceline.compat.horovod.common import objects
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.tensorflow.broadcast import broadcast_
from paceline.compat.horovod.tensorflow.launch import as_written


@as_written
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give the variables (of TensorFlow or Keras) the values of `root_rank`. In a graph, the operation that does.

    inplace: without effect; all variables are sent at once in either case.

    Raises:
        HorovodInternalError: the ranks' variables differ in number, name, shape or type.
    """
    done = broadcast_(list(variables), root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*done)


@as_written
def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that gives all global variables of a graph of TensorFlow 1 the values of `root_rank`.

    Raises:
        RuntimeError: in eager execution, which has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object that `root_rank` gives, on every rank; the root's own is returned as it is.

    The ranks may give objects of any type, such as None elsewhere than on the root. session: not needed here; it is
    for a signature that scripts know.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """`broadcast_object` as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in their order, on every rank."""
    return objects.allgather_object(obj, name, process_set)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all global variables of a graph of TensorFlow 1 the values of `root_rank`, when its session begins.

    It goes into tf.compat.v1.train.MonitoredTrainingSession(hooks=[...]). device: means nothing here.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self._broadcast: Any = None

    def begin(self) -> None:
        # Now: later the graph can't be added to. Once for each graph.
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._broadcast)
