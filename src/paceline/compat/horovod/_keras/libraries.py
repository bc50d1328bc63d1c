"""Which Keras the script uses, and what it computes with."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

KERAS_3, KERAS_2 = "keras", "tf_keras"
_USABLE = ("tensorflow", "torch")


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
