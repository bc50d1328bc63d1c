"""The public names of `horovod.torch`, for `import horovod.torch as hvd`."""

from __future__ import annotations

from paceline.compat.horovod.common import __version__
from paceline.compat.horovod.torch import elastic, mpi_ops
from paceline.compat.horovod.torch.compression import Compression
from paceline.compat.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from paceline.compat.horovod.torch.mpi_ops import *  # noqa: F403
from paceline.compat.horovod.torch.optimizer import DistributedOptimizer
from paceline.compat.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["Compression", "DistributedOptimizer", "SyncBatchNorm", "__version__", "allgather_object"]
__all__ += ["broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "elastic"]
__all__ += mpi_ops.__all__
