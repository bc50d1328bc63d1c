"""The collectives of `horovod.tensorflow`, under the module name by which scripts import them."""

from __future__ import annotations

from paceline.compat.horovod.common import interface
from paceline.compat.horovod.common.basics import HorovodBasics
from paceline.compat.horovod.common.interface import *  # noqa: F403
from paceline.compat.horovod.common.ops import handle_average_backwards_compatibility
from paceline.compat.horovod.common.process_sets import is_process_set_included
from paceline.compat.horovod.tensorflow.allreduce import allreduce, grouped_allreduce
from paceline.compat.horovod.tensorflow.broadcast import broadcast, broadcast_
from paceline.compat.horovod.tensorflow.gather import allgather, alltoall, grouped_allgather
from paceline.compat.horovod.tensorflow.private_names import (
    _allreduce,  # noqa: F401 - imported by libraries that are built on Horovod, as are the next
    _grouped_allreduce,  # noqa: F401
    _normalize_name,  # noqa: F401
)
from paceline.compat.horovod.tensorflow.rank_ops import (
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from paceline.compat.horovod.tensorflow.reducescatter import grouped_reducescatter, reducescatter
from paceline.compat.horovod.tensorflow.util import (
    _executing_eagerly,  # noqa: F401
    check_num_rank_power_of_2,
    gpu_available,
)

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "check_num_rank_power_of_2",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "is_process_set_included",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += interface.__all__

#: Read by libraries that are built on Horovod.
_basics = HorovodBasics()
