"""The names that `horovod.keras` and `horovod.tensorflow.keras` share, each made for its own Keras."""

from __future__ import annotations

from typing import Any

from paceline.compat.horovod._keras import libraries
from paceline.compat.horovod._keras.callbacks import elastic_callbacks_for
from paceline.compat.horovod._keras.elastic import KerasState, run
from paceline.compat.horovod._keras.loading import loader_for
from paceline.compat.horovod._keras.optimizer import DistributedOptimizer
from paceline.compat.horovod._keras.reducing import side_of
from paceline.compat.horovod._keras.values import Values
from paceline.compat.horovod._version import __version__
from paceline.compat.horovod.common import interface


def names_for(library: Any) -> dict[str, Any]:
    """Name -> value of all that is public in the module for this Keras, beside its own submodules."""
    values = Values(library)
    own = {
        "Compression": side_of(libraries.backend_of(library.__name__)).Compression,
        "DistributedOptimizer": DistributedOptimizer,
        "__version__": __version__,
        "allgather": values.allgather,
        "allreduce": values.allreduce,
        "broadcast": values.broadcast,
        "broadcast_global_variables": values.broadcast_global_variables,
        "load_model": loader_for(library),
        "reducescatter": values.reducescatter,
    }
    return own | {name: getattr(interface, name) for name in interface.__all__}


def elastic_names_for(library: Any) -> dict[str, Any]:
    """Name -> value of all that is public in its submodule `elastic`."""
    return {"KerasState": KerasState, "run": run} | elastic_callbacks_for(library)
