"""The names besides collectives that every framework's module exports."""

from __future__ import annotations

from paceline.compat.horovod.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from paceline.compat.horovod.common.exceptions import HorovodInternalError
from paceline.compat.horovod.common.ops import Adasum, Average, Max, Min, Product, Sum
from paceline.compat.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = ["Adasum", "Average", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "Sum"]
__all__ += ["add_process_set", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built"]
__all__ += ["global_process_set", "gloo_built", "gloo_enabled", "init", "is_homogeneous", "is_initialized"]
__all__ += ["local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank"]
__all__ += ["remove_process_set", "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline"]
