"""The public names of `horovod.keras` and `horovod.tensorflow.keras`, created for each Keras library."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from paceline.compat.horovod._keras import settings
from paceline.compat.horovod._keras.callbacks import callbacks_for, elastic_callbacks_for
from paceline.compat.horovod._keras.elastic import KerasState, run
from paceline.compat.horovod._keras.optimizer import DistributedOptimizer, distribute
from paceline.compat.horovod._keras.reducing import side_of
from paceline.compat.horovod._keras.settings import KERAS_3, KerasSettings, backend_of
from paceline.compat.horovod.common import __version__, interface
from paceline.compat.horovod.common.ops import Average
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.common.reduction import Compressor, NoneCompressor


def names_for(library: ModuleType) -> dict[str, object]:
    """Return the public objects of `horovod.keras` for this Keras library, by name."""
    values = Values(library)
    own = {
        "Compression": side_of(settings.backend_of(library.__name__)).Compression,
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


def submodules(package: str, library: ModuleType) -> dict[str, ModuleType]:
    """Return new submodules `callbacks` and `elastic` of a package, by name."""
    elastic = {"KerasState": KerasState, "run": run} | elastic_callbacks_for(library)
    made: dict[str, Mapping[str, object]] = {"callbacks": callbacks_for(library), "elastic": elastic}
    return {name: _submodule(f"{package}.{name}", values) for name, values in made.items()}


def _submodule(name: str, values: Mapping[str, object]) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    # Set a spec, because `importlib.util.find_spec` raises an error for a loaded module without a spec.
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(values, __all__=list(values))
    return module


def loader_for(library: ModuleType) -> Callable[..., Any]:
    """Return the function `load_model` for this Keras library."""

    def load_model(
        filepath: str | os.PathLike[str],
        custom_optimizers: Sequence[type] | None = None,
        custom_objects: Mapping[str, object] | None = None,
        compression: type[Compressor] | None = side_of(backend_of(library.__name__)).Compression.none,  # noqa: B008 - one for each Keras
        legacy_opts: bool = False,
    ) -> Any:
        """Load a model with its optimizer's state as a DistributedOptimizer.

        The saved optimizer may be distributed or not. If the file has no optimizer, the model has no optimizer.

        Args:
            filepath: The model's file.
            custom_optimizers: The script's own optimizer classes.
            custom_objects: The script's other classes and functions, by name.
            compression: A class from hvd.Compression, such as hvd.Compression.fp16. None: no compression.
            legacy_opts: Whether the optimizer is from `tf.keras.optimizers.legacy`. Needed only if the file lacks this.

        Raises:
            ValueError: `legacy_opts` with Keras 3, which has no such optimizers; or the file cannot be read.
        """
        if legacy_opts and library.__name__ == KERAS_3:
            raise ValueError(
                "legacy_opts=True: Keras 3 has no legacy optimizers. Set TF_USE_LEGACY_KERAS=1 (with tf-keras "
                "installed), or leave it out."
            )
        names = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
        model = library.models.load_model(filepath, custom_objects=names or None)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            distribute(optimizer, KerasSettings(compression=compression or NoneCompressor), in_place=True)
            # A loaded model may be set to compile with XLA, but a program that XLA has compiled can't call a collective.
            if getattr(model, "jit_compile", None):
                model.jit_compile = False
        return model

    return load_model


class Values:
    """Collectives of numbers, arrays, tensors or variables for one Keras library."""

    def __init__(self, library: ModuleType | None) -> None:
        self._library = library.__name__ if library is not None else KERAS_3

    def allreduce(
        self,
        value: object,
        name: str | None = None,
        average: bool | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        op: int | None = None,
        compression: type[Compressor] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> object:
        """Reduce the ranks' values by `op`, by default Average.

        Raises:
            ValueError: Both `average` and `op` are given.
            HorovodInternalError: Shapes, types or operations differ between ranks. Every rank raises this error.
        """
        side = self._side()
        return side.allreduce(
            side.tensor(value),
            average=average,
            name=name,
            compression=compression or side.Compression.none,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    def allgather(self, value: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> object:
        """Concatenate the ranks' values, whose first dimension may differ."""
        side = self._side()
        return side.allgather(side.tensor(value), name=name, process_set=process_set)

    def broadcast(
        self, value: object, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> object:
        """Return the value of `root_rank`."""
        side = self._side()
        return side.broadcast(side.tensor(value), root_rank, name=name, process_set=process_set)

    def reducescatter(
        self, value: object, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
    ) -> object:
        """Return this rank's share of the reduced value's rows."""
        side = self._side()
        return side.reducescatter(side.tensor(value), name=name, op=op, process_set=process_set)

    def broadcast_global_variables(self, root_rank: int) -> NoReturn:
        """Raise an error: eager TensorFlow has no global variables.

        Raises:
            RuntimeError: Always. The message names the alternative.
        """
        raise RuntimeError(
            f"broadcast_global_variables({root_rank}) is for graphs of TensorFlow 1. Give model.fit the callback "
            f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})."
        )

    def _side(self) -> ModuleType:
        return side_of(backend_of(self._library))
