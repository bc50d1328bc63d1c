"""The names under which tensors and variables meet those of other ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops


def operation_name(kind: str, name: str | None, tensor: Any, ignore_name_scope: bool = False) -> str | None:
    """The name of an operation on this tensor; None: it has none, and meets the one that is as manieth on other ranks.

    In a graph it is made of the tensor's own where none is given, comes with the name scope unless that is to be
    ignored, and is unique in its graph.
    """
    if tf.executing_eagerly():
        return name
    base = name or f"Horovod{kind}_{normalised(tensor.name)}"
    return base if ignore_name_scope else unique_in_graph(base)


def unique_in_graph(name: str) -> str:
    """The name with the current name scope, and with a number if it was given out before in this graph."""
    if tf.executing_eagerly():
        return name
    graph = ops.get_default_graph()
    scope = graph.get_name_scope()
    # A name of any form is right for the engine, not for a graph; those that are the same there get numbers, too.
    unique = str(graph.unique_name(normalised(name)))
    suffix = unique[len(f"{scope}/") if scope else 0 :][len(normalised(name)) :]
    return f"{scope}/{name}{suffix}" if scope else f"{name}{suffix}"


def normalised(name: str) -> str:
    """The name, with a line for everything that can't stand in the name of a graph's operation."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name) or "_"


def raw(variable: Any) -> Any:
    """TensorFlow's own variable, of one of Keras 3 or of itself."""
    # A variable of Keras 3 holds TensorFlow's in `value`. TensorFlow's own has a method of that name.
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) or isinstance(variable, tf.Variable) else value


def key(variable: Any) -> int:
    """A key that tells variables apart; the same for one of Keras 3 and the one within it."""
    return id(raw(variable))


@dataclass(frozen=True, eq=False)
class Named:
    """Stands for a variable where only its name counts."""

    path: str


def by_place(count: int) -> list[Named]:
    """What stands for so many variables that the ranks know by their places."""
    return [Named(f"gradient.{place}") for place in range(count)]


def variable_names(variables: Sequence[Any]) -> list[str]:
    """A name for each: its path or name, with a number where several have the same."""
    seen: Counter[str] = Counter()
    found = []
    for variable in variables:
        name = str(getattr(variable, "path", None) or getattr(variable, "name", None) or "variable")
        name = name.removesuffix(":0")
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name] - 1}")
    return found
