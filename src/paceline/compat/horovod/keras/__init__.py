"""`horovod.keras`: `import horovod.keras as hvd`, for scripts that use `keras`."""

from __future__ import annotations

from paceline.compat.horovod._keras import libraries
from paceline.compat.horovod._keras.loading import loader_for
from paceline.compat.horovod._keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from paceline.compat.horovod._keras.reducing import side_of
from paceline.compat.horovod._keras.values import Values
from paceline.compat.horovod._version import __version__
from paceline.compat.horovod.common import interface
from paceline.compat.horovod.common.interface import *  # noqa: F403
from paceline.compat.horovod.keras import callbacks, elastic

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "__version__",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += interface.__all__

_library = libraries.standalone()
_values = Values(_library)
allgather, allreduce = _values.allgather, _values.allreduce
broadcast, reducescatter = _values.broadcast, _values.reducescatter
broadcast_global_variables = _values.broadcast_global_variables
Compression = side_of(libraries.backend_of(_library.__name__)).Compression
load_model = loader_for(_library)
