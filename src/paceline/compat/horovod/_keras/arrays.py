"""Variables and metrics between the ranks, as NumPy arrays: the same for every framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.compat.horovod.common import basics, handles
from paceline.compat.horovod.common.ops import ENGINE_NAMES, Average
from paceline.compat.horovod.common.process_sets import global_process_set


def broadcast_variables(variables: Sequence[Any], root_rank: int, name: str) -> None:
    """Give the variables the values of `root_rank`. Every rank has equally many, of the same shapes and types.

    variables: of Keras 3 on any backend, or of TensorFlow; they have `numpy()` and `assign()`.
    """
    sent = [_plain(variable.numpy()) for variable in variables]
    under_way = [_broadcast(array, root_rank, f"{name}.{index}") for index, array in enumerate(sent)]
    for variable, array, handle in zip(variables, sent, under_way, strict=True):
        handles.synchronize(handle)
        if basics.rank() != root_rank:
            variable.assign(_as_type(array, variable.numpy()))


def average(array: Any, name: str) -> Any:
    """The ranks' average of a NumPy array of floats, as a new array."""
    op = ENGINE_NAMES[Average]
    return handles.synchronize(
        handles.submit(
            "allreduce",
            name,
            global_process_set,
            lambda engine, full: engine.allreduce(full, array, op=op),
            lambda result: result,
        )
    )


def _broadcast(array: Any, root_rank: int, name: str) -> int:
    return handles.submit(
        "broadcast",
        name,
        global_process_set,
        lambda engine, full: engine.broadcast(full, array, root=root_rank, out=array),
        lambda _: array,
    )


def _plain(value: Any) -> Any:
    """A copy that the engine can write to; of a type that NumPy lacks (bfloat16, float8), its bits."""
    import numpy as np

    array = np.array(value)
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _as_type(array: Any, like: Any) -> Any:
    return array if array.dtype == like.dtype else array.view(like.dtype)
