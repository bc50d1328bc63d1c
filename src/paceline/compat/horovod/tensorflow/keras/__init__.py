"""`horovod.tensorflow.keras`: `import horovod.tensorflow.keras as hvd`, for scripts that use `tf.keras`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.compat.horovod import __version__
from paceline.compat.horovod._keras import libraries, loading
from paceline.compat.horovod._keras.optimizer import DistributedOptimizer
from paceline.compat.horovod._keras.reducing import side_of
from paceline.compat.horovod._keras.values import Values
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
from paceline.compat.horovod.tensorflow.keras import callbacks, elastic

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "__version__",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_library = libraries.of_tensorflow()
_values = Values(_library)
allgather, allreduce = _values.allgather, _values.allreduce
broadcast, reducescatter = _values.broadcast, _values.reducescatter
broadcast_global_variables = _values.broadcast_global_variables
Compression = side_of(libraries.backend_of(_library.__name__)).Compression


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """The model in the file, with its optimizer's state, as a DistributedOptimizer.

    The file may come from a model with or without one. A model that was saved without an optimizer stays without.

    custom_optimizers: classes of the script's own. custom_objects: its other classes and functions, by name.
    legacy_opts: the file's optimizer is one of `tf.keras.optimizers.legacy`; such a file says so itself.

    Raises:
        ValueError: `legacy_opts` with Keras 3, which has no such optimizers; or the file can't be read.
    """
    return loading.load_model(_library, filepath, custom_optimizers, custom_objects, compression, legacy_opts)
