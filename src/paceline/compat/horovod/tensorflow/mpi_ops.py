"""The module that scripts import for the collectives of `horovod.tensorflow`, and for operations that return ranks and sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from paceline.compat.horovod.common import basics, handles, interface
from paceline.compat.horovod.common.basics import HorovodBasics
from paceline.compat.horovod.common.interface import *  # noqa: F403
from paceline.compat.horovod.common.ops import handle_average_backwards_compatibility
from paceline.compat.horovod.common.process_sets import is_process_set_included
from paceline.compat.horovod.tensorflow.allreduce import allreduce, grouped_allreduce
from paceline.compat.horovod.tensorflow.broadcast import broadcast, broadcast_
from paceline.compat.horovod.tensorflow.gather import allgather, alltoall, grouped_allgather
from paceline.compat.horovod.tensorflow.launch import as_written, refuse_xla, translated
from paceline.compat.horovod.tensorflow.private_names import _allreduce, _grouped_allreduce, _normalize_name  # noqa: F401 - for libraries built on Horovod, as are the next
from paceline.compat.horovod.tensorflow.reducescatter import grouped_reducescatter, reducescatter
from paceline.compat.horovod.tensorflow.util import _executing_eagerly, check_num_rank_power_of_2, gpu_available  # noqa: F401

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "check_num_rank_power_of_2"]
__all__ += ["gpu_available", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter"]
__all__ += ["handle_average_backwards_compatibility", "is_process_set_included", "join", "local_rank_op"]
__all__ += ["local_size_op", "process_set_included_op", "rank_op", "reducescatter", "size_op"]
__all__ += interface.__all__

#: Libraries that use Horovod read this private name.
_basics = HorovodBasics()


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return a process set's number of ranks, evaluated when the graph runs.

    Raises:
        ValueError: There is no such process set.
    """
    return _asked(lambda: len(_members(process_set_id)), name or "HorovodSize")


@as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this rank's machine, as int32."""
    return _asked(basics.local_size, name or "HorovodLocalSize")


@as_written
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank, as int32."""
    return _asked(basics.rank, name or "HorovodRank")


@as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank on its machine, as int32."""
    return _asked(basics.local_rank, name or "HorovodLocalRank")


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this rank belongs to the set, else 0."""
    return _asked(lambda: basics.rank() in _members(process_set_id), name or "HorovodProcessSetIncluded")


@as_written
def join() -> tf.Tensor:
    """Wait until all ranks have joined; return the rank that joined last.

    Until then this rank contributes zeros to other ranks' allreduces. Averages still divide by the number of all ranks.

    Raises:
        HorovodInternalError: Another rank requests an operation that needs this rank's data, such as an allgather.
    """
    return _asked(_joined, "HorovodJoin")


def _members(process_set_id: int) -> tuple[int, ...]:
    known = basics.engine().process_sets()
    if process_set_id not in known:
        raise ValueError(f"there is no process set {process_set_id}; there are {sorted(known)}.")
    return known[process_set_id]


def _joined() -> int:
    running = basics.engine()
    with translated(), handles.translated():
        return int(running.join().wait())


def _asked(question: Callable[[], int], name: str) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(int(question()), tf.int32)
    refuse_xla()
    # The operation is stateful, so TensorFlow calls `question` each time that the graph runs.
    answer = tf.numpy_function(lambda: np.int32(question()), [], tf.int32, name=name)
    answer.set_shape([])
    return answer
