"""Objects of any kind between the ranks, pickled. Needs no framework."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from paceline.compat.horovod.common import basics, handles
from paceline.compat.horovod.common.arrays import allgather_async, broadcast_async_
from paceline.compat.horovod.common.process_sets import ProcessSet, check_root, global_process_set

if TYPE_CHECKING:
    import numpy as np


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object that `root_rank` gives, on every rank; the root's own is returned as it is.

    The ranks may give objects of any type. It is pickled (by cloudpickle, where that is installed, which takes
    functions and lambdas too).

    Raises:
        ValueError: `root_rank` is not in the process set.
    """
    import numpy as np

    check_root(root_rank, process_set)
    is_root = basics.rank() == root_rank
    data = _bytes(obj) if is_root else np.empty(0, np.uint8)
    size = np.array([data.size], np.int64)
    handles.synchronize(broadcast_async_(size, root_rank, _part(name, "size"), process_set))
    payload = data if is_root else np.empty(int(size[0]), np.uint8)
    handles.synchronize(broadcast_async_(payload, root_rank, _part(name, "data"), process_set))
    return obj if is_root else pickle.loads(payload.tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in their order, on every rank."""
    import numpy as np

    data = _bytes(obj)
    sizes = allgather_async(np.array([data.size], np.int64), _part(name, "sizes"), process_set)
    payload = allgather_async(data, _part(name, "data"), process_set)
    counts, everything = handles.synchronize(sizes).tolist(), handles.synchronize(payload).tobytes()
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [pickle.loads(everything[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _bytes(obj: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    try:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        data = pickle.dumps(obj)
    else:
        data = cloudpickle.dumps(obj)
    # A copy: the bytes of an object can't be written to, and the root's are what is sent from.
    made: np.ndarray[Any, Any] = np.frombuffer(data, np.uint8).copy()
    return made
