"""load_model: a saved model whose optimizer is distributed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.compat.horovod._keras.libraries import KERAS_3, backend_of
from paceline.compat.horovod._keras.optimizer import distribute
from paceline.compat.horovod._keras.reducing import side_of
from paceline.compat.horovod._keras.settings import KerasSettings
from paceline.compat.horovod.common.compression import NoneCompressor


def loader_for(library: Any) -> Callable[..., Any]:
    """`load_model` for a Keras. library: the module that reads the file."""

    def load_model(
        filepath: Any,
        custom_optimizers: Sequence[type] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        compression: Any = side_of(backend_of(library.__name__)).Compression.none,  # noqa: B008 - one for each Keras
        legacy_opts: bool = False,
    ) -> Any:
        """The model in the file, with its optimizer's state, as a DistributedOptimizer.

        The file may come from a model with or without one. A model that was saved without an optimizer stays without.

        custom_optimizers: classes of the script's own. custom_objects: its other classes and functions, by name.
        legacy_opts: the file's optimizer is one of `tf.keras.optimizers.legacy`; such a file says so itself.

        Raises:
            ValueError: `legacy_opts` with Keras 3, which has no such optimizers; or the file can't be read.
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
            # The file says how the model was compiled, perhaps for XLA, whose programs can't call a collective.
            if getattr(model, "jit_compile", None):
                model.jit_compile = False
        return model

    return load_model
