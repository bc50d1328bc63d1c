"""Variables and metrics between the ranks, as NumPy arrays: the same for every framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.compat.horovod.common import basics, handles
from paceline.compat.horovod.common.arrays import allreduce_async, as_type, broadcast_async_, plain
from paceline.compat.horovod.common.ops import ENGINE_NAMES, Average


def broadcast_variables(variables: Sequence[Any], root_rank: int, name: str) -> None:
    """Give the variables the values of `root_rank`. Every rank has equally many, of the same shapes and types.

    variables: of Keras 3 on any backend, or of TensorFlow; they have `numpy()` and `assign()`.
    """
    import numpy as np

    # Copies: the engine writes to what it is given.
    sent = [plain(np.array(variable.numpy())) for variable in variables]
    under_way = [broadcast_async_(array, root_rank, f"{name}.{index}") for index, array in enumerate(sent)]
    for variable, array, handle in zip(variables, sent, under_way, strict=True):
        handles.synchronize(handle)
        # The root has these values already.
        if basics.rank() != root_rank:
            variable.assign(as_type(array, variable.numpy()))


def average(array: Any, name: str) -> Any:
    """The ranks' average of a NumPy array of floats, as a new array."""
    return handles.synchronize(allreduce_async(array, ENGINE_NAMES[Average], name))
