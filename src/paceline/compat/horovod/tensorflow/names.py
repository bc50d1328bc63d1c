"""Names that match tensors and variables across ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.python.framework import ops


def operation_name(kind: str, name: str | None, tensor: tf.Tensor, ignore_name_scope: bool = False) -> str | None:
    """Return the name by which ranks match an operation; None: by its order."""
    # In a graph, derive a missing name from the tensor's name. Unless `ignore_name_scope` is set, add the name scope, and a
    # number that makes the name unique in the graph.
    if tf.executing_eagerly():
        return name
    base = name or f"Horovod{kind}_{normalised(tensor.name)}"
    return base if ignore_name_scope else unique_in_graph(base)


def unique_in_graph(name: str) -> str:
    """Return an operation's name with its scope, and a number if not unique."""
    if tf.executing_eagerly():
        return name
    graph = ops.get_default_graph()
    scope = graph.get_name_scope()
    # Make the name valid in a graph. (The engine accepts any name.) A name that exists already gets a number.
    unique = str(graph.unique_name(normalised(name)))
    suffix = unique[len(f"{scope}/") if scope else 0 :][len(normalised(name)) :]
    return f"{scope}/{name}{suffix}" if scope else f"{name}{suffix}"


def normalised(name: str) -> str:
    """Replace characters that a graph does not allow in names by underscores."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name) or "_"


def raw(variable: tf.Variable) -> tf.Variable:
    """Return the TensorFlow variable behind a TensorFlow or Keras 3 variable."""
    # `value` is TensorFlow's variable in a Keras 3 variable, but a method in TensorFlow's own variable.
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) or isinstance(variable, tf.Variable) else value


def key(variable: tf.Variable) -> int:
    """Return a dictionary key, equal for a Keras 3 variable and its TensorFlow variable."""
    return id(raw(variable))


@dataclass(frozen=True, eq=False)
class Named:
    """A named placeholder for a variable, by which ranks match its gradient."""

    path: str


def by_place(count: int) -> list[Named]:
    """Return `count` names for gradients without a variable's name: `gradient.0`, `gradient.1`, ..."""
    return [Named(f"gradient.{place}") for place in range(count)]


def variable_names(variables: Sequence[tf.Variable]) -> list[str]:
    """Return the variables' paths or names, with a number for duplicates."""
    seen: Counter[str] = Counter()
    names = []
    for variable in variables:
        name = str(getattr(variable, "path", None) or getattr(variable, "name", None) or "variable")
        name = name.removesuffix(":0")
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name] - 1}")
    return names
