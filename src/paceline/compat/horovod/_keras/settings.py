"""Checked settings of a DistributedOptimizer, and the choice of a script's Keras."""

from __future__ import annotations

import importlib
import os
import re
import sys
from dataclasses import dataclass, field
from types import ModuleType

from paceline.compat.horovod.common.ops import Average, Sum
from paceline.compat.horovod.common.reduction import Reduction
from paceline.compat.horovod.common.types import KerasLayer, Variable

KERAS_3, KERAS_2 = "keras", "tf_keras"
_USABLE = ("tensorflow", "torch")


@dataclass(frozen=True, kw_only=True)
class KerasSettings(Reduction):
    """Settings of the reduction of gradients between the backward pass and the update.

    The gradients of `passes` backward passes are summed or, if `average_passes` is True, averaged. Not reduced are the
    gradients of `local_layers`, and of variables whose key (`key_of`) is in `local_variables`.
    """

    passes: int = 1
    average_passes: bool = False
    local_layers: tuple[KerasLayer, ...] = ()
    local_variables: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum):
            raise ValueError(f"op={self.op!r}: gradients can be reduced by op=hvd.Average or op=hvd.Sum in Keras.")
        super().__post_init__()
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step={self.passes}: it must be at least 1.")

    def local_keys(self) -> set[int]:
        """Return the keys of variables whose gradients are not reduced."""
        weights = (weight for layer in self.local_layers for weight in layer.trainable_weights)
        return self.local_variables | {key_of(weight) for weight in weights}


def key_of(variable: object) -> int:
    """Return a dictionary key shared by a Keras variable and its backend's tensor."""
    return id(getattr(variable, "_value", variable))


def shared_name(place: int, variable: Variable) -> str:
    """Return a gradient's name, equal on all ranks, for the variable at `place`.

    The name has `place`, the position among the optimizer's variables, and the last part of the variable's path. Other
    parts may differ between ranks: Keras numbers all layers of a process, and a model from a file has shorter paths.
    """
    name = str(getattr(variable, "path", None) or variable.name).removesuffix(":0").rsplit("/", 1)[-1]
    return f"{place}.{re.sub(r'_[0-9]+$', '', name)}"


def standalone() -> ModuleType:
    """Return the module behind a script's `import keras`."""
    # With TF_USE_LEGACY_KERAS, TensorFlow itself does not load `keras`. If `keras` is loaded, the script has imported it.
    return _load(KERAS_2 if wants_keras_2() and KERAS_3 not in sys.modules else KERAS_3)


def of_tensorflow() -> ModuleType:
    """Return the module behind `tf.keras`: `keras`, or `tf_keras` with TF_USE_LEGACY_KERAS=1."""
    return _load(KERAS_2 if wants_keras_2() else KERAS_3)


def wants_keras_2() -> bool:
    """Return whether TensorFlow would use tf_keras."""
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")


def name_of(thing: object) -> str | None:
    """Return the library of an object's class, "keras" or "tf_keras", or None."""
    packages = {cls.__module__.partition(".")[0] for cls in type(thing).__mro__}
    return KERAS_2 if KERAS_2 in packages else KERAS_3 if KERAS_3 in packages else None


def backend_of(library: str) -> str:
    """Return the backend of this Keras library, "tensorflow" or "torch"."""
    if library == KERAS_2:
        return "tensorflow"
    backend = str(_load(KERAS_3).backend.backend())
    if backend not in _USABLE:
        raise ValueError(
            f"Keras runs on the backend {backend!r}, whose programs can't call a collective from Python. "
            "Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported."
        )
    return backend


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        hint = "" if name == KERAS_3 else ", or unset TF_USE_LEGACY_KERAS to use Keras 3"
        raise ModuleNotFoundError(
            f"this script needs {name}, which isn't installed. Install it (pip install {name.replace('_', '-')}){hint}.",
            name=name,
        ) from error
