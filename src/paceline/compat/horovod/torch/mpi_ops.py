"""The collectives of `horovod.torch`, under the module name that scripts import."""

from __future__ import annotations

from paceline.compat.horovod.common import handles, interface
from paceline.compat.horovod.common.basics import HorovodBasics, engine
from paceline.compat.horovod.common.handles import poll, synchronize
from paceline.compat.horovod.common.interface import *  # noqa: F403
from paceline.compat.horovod.common.ops import handle_average_backwards_compatibility
from paceline.compat.horovod.common.process_sets import ProcessSet, checked_members, global_process_set
from paceline.compat.horovod.torch.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from paceline.compat.horovod.torch.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from paceline.compat.horovod.torch.gather import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from paceline.compat.horovod.torch.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)

__all__ = ["allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
__all__ += ["alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_"]
__all__ += ["grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter"]
__all__ += ["grouped_reducescatter_async", "handle_average_backwards_compatibility", "join", "poll", "reducescatter"]
__all__ += ["reducescatter_async", "sparse_allreduce_async", "synchronize"]
__all__ += interface.__all__

#: Libraries that are built on Horovod read this private name.
_basics = HorovodBasics()


def join(device: int = -1) -> int:
    """Wait until all ranks have joined; return the rank that joined last.

    Until all ranks have joined, this rank contributes zeros to the allreduces of other ranks. Averages still divide by
    the number of all ranks. `device` is ignored: the zeros are in host memory.

    Raises:
        HorovodInternalError: Another rank requests an operation that needs this rank's data, such as an allgather.
    """
    running = engine()
    with handles.translated():
        return int(running.join().wait())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called `barrier`."""
    checked_members(process_set)
    number = process_set.process_set_id
    assert number is not None
    with handles.translated():
        engine().barrier(number).wait()
