"""Helpers that scripts import from `horovod.tensorflow.util` and `horovod.tensorflow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from paceline.compat.horovod.common.ops import is_power_of_two
from paceline.compat.horovod.common.util import _cache  # noqa: F401 - a name that libraries import


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether Adasum works with this number of ranks.

    Raises:
        ValueError: The number is less than 1.
    """
    if num_rank < 1:
        raise ValueError(f"num_rank={num_rank}: it must be at least 1.")
    return is_power_of_two(num_rank)


def gpu_available(verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def refs_to_vars(refs: Iterable[object]) -> list[object]:
    """Return the variables of these references (`variable.ref()`)."""
    return [ref.deref() if hasattr(ref, "deref") else ref for ref in refs]


def vars_to_refs(variables: Any) -> object:
    """Return hashable references to the variables, nested in the same way."""
    if isinstance(variables, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in variables)
    return variables.ref() if hasattr(variables, "ref") else variables.value.ref()


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., object]) -> tf.types.experimental.GenericFunction:
    return tf.function(function)
