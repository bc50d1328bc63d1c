"""The public names of `horovod.tensorflow`, for `import horovod.tensorflow as hvd`."""

from __future__ import annotations

from paceline.compat.horovod.common import __version__
from paceline.compat.horovod.common.util import _cache  # noqa: F401
from paceline.compat.horovod.tensorflow import elastic, mpi_ops
from paceline.compat.horovod.tensorflow.compression import Compression
from paceline.compat.horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from paceline.compat.horovod.tensorflow.mpi_ops import *  # noqa: F403
from paceline.compat.horovod.tensorflow.optimizer import DistributedOptimizer
from paceline.compat.horovod.tensorflow.private_names import _allreduce, _grouped_allreduce, _make_allreduce_grads_fn  # noqa: F401 - for libraries built on Horovod, as are the next
from paceline.compat.horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from paceline.compat.horovod.tensorflow.util import _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs  # noqa: F401

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",  # noqa: F405 - made on use
    "__version__",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
]
__all__ += mpi_ops.__all__


def __getattr__(name: str) -> object:
    if name == "SyncBatchNormalization":
        from paceline.compat.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
