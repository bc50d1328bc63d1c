"""Objects of any kind between the ranks, pickled. Needs no framework."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from paceline.compat.horovod.common import basics, handles
from paceline.compat.horovod.common.process_sets import (
    ProcessSet,
    checked_members,
    global_process_set,
    registered_number,
)

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

    members = checked_members(process_set)
    if root_rank not in members:
        raise ValueError(
            f"root_rank={root_rank} is not among the ranks {members}. It is a rank of the world, in a process set too."
        )
    is_root = basics.rank() == root_rank
    data = _bytes(obj) if is_root else np.empty(0, np.uint8)
    size = np.array([data.size], np.int64)
    _broadcast(size, root_rank, None if name is None else f"{name}.size", process_set)
    payload = data if is_root else np.empty(int(size[0]), np.uint8)
    _broadcast(payload, root_rank, None if name is None else f"{name}.data", process_set)
    return obj if is_root else pickle.loads(payload.tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in their order, on every rank."""
    import numpy as np

    data = _bytes(obj)
    sizes = _allgather(np.array([data.size], np.int64), None if name is None else f"{name}.sizes", process_set)
    payload = _allgather(data, None if name is None else f"{name}.data", process_set)
    counts, everything = handles.synchronize(sizes).tolist(), handles.synchronize(payload).tobytes()
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [pickle.loads(everything[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def _broadcast(array: np.ndarray[Any, Any], root: int, name: str | None, process_set: ProcessSet) -> None:
    def start(engine: Any, full: str) -> Any:
        return engine.broadcast(full, array, root=root, out=array, process_set=registered_number(process_set))

    handles.synchronize(handles.submit("broadcast", name, process_set, start, lambda _: None))


def _allgather(array: np.ndarray[Any, Any], name: str | None, process_set: ProcessSet) -> int:
    def start(engine: Any, full: str) -> Any:
        return engine.allgather(full, array, process_set=registered_number(process_set))

    return handles.submit("allgather", name, process_set, start, lambda result: result)


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
