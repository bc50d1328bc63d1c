"""Broadcasts of variables and objects, so that all ranks start equal."""

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
    variables: Sequence[tf.Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Set the variables to the values of `root_rank`.

    `variables` are TensorFlow's or Keras's. In a graph, return the operation that sets the variables; eagerly, return
    None. `inplace` has no effect: all variables are always sent together.

    Raises:
        HorovodInternalError: The ranks' variables differ in number, name, shape or type.
    """
    done = broadcast_(list(variables), root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*done)


@as_written
def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return the operation that broadcasts a TensorFlow 1 graph's variables.

    Raises:
        RuntimeError: Eager execution has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_object(
    obj: object = None,
    root_rank: int = 0,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of `root_rank` on every rank.

    Ranks other than the root may pass any object, such as None. `session` has no effect.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[object], Any]:
    """Return a function that broadcasts its argument, as `broadcast_object` does."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: object,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks in rank order."""
    return objects.allgather_object(obj, name, process_set)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A session hook that broadcasts all global variables.

    Pass it to tf.compat.v1.train.MonitoredTrainingSession(hooks=[...]). `device` has no effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self._broadcast: tf.Operation | None = None

    def begin(self) -> None:
        # Create the broadcast now, once for each graph, because a session may make its graph read-only.
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        session.run(self._broadcast)
