"""The settings of a DistributedOptimizer, as the script has given them, checked."""

from __future__ import annotations

import importlib
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from paceline.compat.horovod.common.ops import Average, Sum
from paceline.compat.horovod.common.reduction import Reduction

KERAS_3, KERAS_2 = "keras", "tf_keras"
_USABLE = ("tensorflow", "torch")


@dataclass(frozen=True, kw_only=True)
class KerasSettings(Reduction):
    """The treatment of gradients between the backward pass and the update.

    passes: gradients of so many backward passes are added up, and averaged too with `average_passes`.
    local_layers: layers whose gradients stay on their rank; local_variables: keys (`key_of`) of single variables.
    """

    passes: int = 1
    average_passes: bool = False
    local_layers: tuple[Any, ...] = ()
    local_variables: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum):
            raise ValueError(f"op={self.op!r}: gradients can be reduced by op=hvd.Average or op=hvd.Sum in Keras.")
        super().__post_init__()
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step={self.passes}: it must be at least 1.")

    def local_keys(self) -> set[int]:
        """The keys of all variables that stay local, those of layers that were built meanwhile among them."""
        weights = (weight for layer in self.local_layers for weight in layer.trainable_weights)
        return self.local_variables | {key_of(weight) for weight in weights}


def key_of(variable: Any) -> int:
    """A key that tells a variable from others. Keras's own object and the backend's variable in it count as one."""
    return id(getattr(variable, "_value", variable))


def shared_name(place: int, variable: Any) -> str:
    """A name for the variable's gradient that is the same on every rank: its place among the optimizer's variables, and
    the last part of its path.

    The rest of the path may differ. Keras numbers layers by how many were there before them in the process, and those of
    a model that was read from a file lack the names of what is around them.
    """
    name = str(getattr(variable, "path", None) or variable.name).removesuffix(":0").rsplit("/", 1)[-1]
    return f"{place}.{re.sub(r'_[0-9]+$', '', name)}"


def standalone() -> Any:
    """The module that a script's `import keras` stands for: `keras`, or `tf_keras` with TF_USE_LEGACY_KERAS=1.

    With that, TensorFlow doesn't load `keras`; where it is loaded all the same, the script has asked for it.
    """
    return _load(KERAS_2 if wants_keras_2() and KERAS_3 not in sys.modules else KERAS_3)


def of_tensorflow() -> Any:
    """The module that `tf.keras` stands for: `keras`, or `tf_keras` with TF_USE_LEGACY_KERAS=1."""
    return _load(KERAS_2 if wants_keras_2() else KERAS_3)


def wants_keras_2() -> bool:
    """True if TensorFlow would take tf_keras; it knows the same three words."""
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")


def name_of(thing: Any) -> str | None:
    """Which Keras an object's class comes from, by its line of ancestors; None for neither."""
    packages = {cls.__module__.partition(".")[0] for cls in type(thing).__mro__}
    return KERAS_2 if KERAS_2 in packages else KERAS_3 if KERAS_3 in packages else None


def backend_of(library: str) -> str:
    """ "tensorflow" or "torch": what this Keras computes with.

    Raises:
        ValueError: Keras 3 runs on another backend.
    """
    if library == KERAS_2:
        return "tensorflow"
    backend = str(_load(KERAS_3).backend.backend())
    if backend not in _USABLE:
        raise ValueError(
            f"Keras runs on the backend {backend!r}, whose programs can't call a collective from Python. "
            "Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported."
        )
    return backend


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # That Keras is there, and a module that it needs is not: its own error says which.
        if error.name != name:
            raise
        hint = "" if name == KERAS_3 else ", or unset TF_USE_LEGACY_KERAS to use Keras 3"
        raise ModuleNotFoundError(
            f"this script needs {name}, which isn't installed. Install it (pip install {name.replace('_', '-')}){hint}.",
            name=name,
        ) from error
