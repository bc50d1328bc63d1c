"""Nested containers as lists of leaves, and back.

    {"x": [a, b], "y": c}   ->   [a, b, c]   and a Structure: dict("x": list(leaf, leaf), "y": leaf)

Containers are mappings, tuples, named tuples, lists and dataclasses of any class. All other objects are leaves,
including None. `torch.utils._pytree` and optree treat a dataclass, a UserDict or a subclass of dict as a leaf unless
its class is registered for the whole process. optree also sorts the keys of a dict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

#: One step of a path into nested containers: ("item", key) means container[key], and ("attr", name) means container.name.
Step = tuple[str, Hashable]
Path = tuple[Step, ...]

#: The types of containers whose items a script may change in place.
Changeable = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


@dataclass(frozen=True)
class Container:
    """The class and the keys of a container, without its values.

    Attributes:
        kind: The class of the container.
        steps: The key, index or field of each value, in order.
        factory: The default factory of a defaultdict.
    """

    kind: type[Any]
    steps: Path
    factory: Callable[[], object] | None = None

    def make(self, values: Iterable[object]) -> object:
        """Return a container of the same class with these values.

        For a dataclass, call its constructor, which computes the fields with init=False.
        """
        named = dict(zip((key for _, key in self.steps), values, strict=True))
        if issubclass(self.kind, Mapping):
            return self._mapping(named)
        if issubclass(self.kind, (tuple, list)):
            # Pass the values of a named tuple as separate arguments. Pass the values of any other tuple or list as one iterable.
            return self.kind(*(named.values() if hasattr(self.kind, "_fields") else [named.values()]))
        return self.kind(**{field.name: named[field.name] for field in dataclasses.fields(self.kind) if field.init})

    def _mapping(self, values: dict[Any, object]) -> object:
        if issubclass(self.kind, defaultdict):
            return self.kind(self.factory, values)
        with contextlib.suppress(TypeError):
            return self.kind(values)
        with contextlib.suppress(TypeError):
            # A mapping that is also a dataclass, such as the outputs of some libraries, takes its values as keyword arguments.
            return self.kind(**values)
        # No constructor fits: return a plain dict, which at least has the values.
        return values


@dataclass(frozen=True)
class Structure:
    """The nested containers of a value, without the leaves. Equal containers have equal structures.

    Attributes:
        container: The outermost container; None for a leaf.
        parts: The structure of each of the container's values.
    """

    container: Container | None = None
    parts: tuple[Structure, ...] = ()

    def rebuild(self, leaves: Iterable[object]) -> Any:
        """Return nested containers of this structure with these leaves."""
        return self._made(iter(leaves))

    def _made(self, leaves: Iterator[object]) -> object:
        if self.container is None:
            return next(leaves)
        return self.container.make([part._made(leaves) for part in self.parts])

    def paths(self) -> Iterator[Path]:
        """Yield the path to each leaf, in order."""
        if self.container is None:
            yield ()
            return
        for step, part in zip(self.container.steps, self.parts, strict=True):
            for path in part.paths():
                yield (step, *path)


_LEAF = Structure()


def open_container(value: object) -> tuple[Container, tuple[object, ...]] | None:
    """Return a container's description and its values. Return None for a leaf."""
    kind = type(value)
    match value:
        case Tensor():
            return None
        case Mapping():
            steps = tuple(("item", key) for key in value)
            # Read `default_factory` only of a defaultdict: the __getattr__ of another mapping may raise any error.
            factory = value.default_factory if isinstance(value, defaultdict) else None
            return Container(kind, steps, factory), tuple(value.values())
        case tuple() if hasattr(value, "_fields"):
            return Container(kind, tuple(("attr", name) for name in value._fields)), tuple(value)
        case tuple() | list():
            return Container(kind, tuple(("item", index) for index in range(len(value)))), tuple(value)
    # Exclude classes, for which is_dataclass is True as well.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return Container(kind, tuple(("attr", name) for name in names)), tuple(getattr(value, name) for name in names)
    return None


def _never(value: object) -> bool:
    return False


def flatten(value: object, is_leaf: Callable[[object], bool] = _never) -> tuple[list[object], Structure]:
    """Return all leaves of nested containers, and the structure of the containers.

    A container for which `is_leaf` returns True counts as a leaf.
    """
    leaves: list[object] = []

    def structure(item: object) -> Structure:
        opened = None if is_leaf(item) else open_container(item)
        if opened is None:
            leaves.append(item)
            return _LEAF
        return Structure(opened[0], tuple(map(structure, opened[1])))

    return leaves, structure(value)


def map_leaves(value: _T, change: Callable[[object], object], is_leaf: Callable[[object], bool] = _never) -> _T:
    """Copy nested containers, with `change` applied to each leaf."""
    leaves, structure = flatten(value, is_leaf)
    changed: _T = structure.rebuild(map(change, leaves))
    return changed


def map_tensors(value: _T, change: Callable[[Tensor], object]) -> _T:
    """Copy nested containers, with `change` applied to each tensor."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def tensors_in(value: object) -> list[Tensor]:
    """Return all tensors in nested containers, in order."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def tensors_at(value: object) -> list[tuple[Path, Tensor]]:
    """Return (path, tensor) of all tensors in nested containers, in order."""
    leaves, structure = flatten(value)
    return [(path, leaf) for path, leaf in zip(structure.paths(), leaves, strict=True) if isinstance(leaf, Tensor)]


def refill(container: Changeable, before: Changeable) -> None:
    """Give a container its former items `before`, if they have changed."""
    if len(container) == len(before) and all(map(operator.is_, _items(container), _items(before))):
        return
    container.clear()
    match container:
        case list() | deque():
            container.extend(before)
        case _:
            container.update(before)


def _items(container: Changeable) -> Iterable[object]:
    return chain(container, container.values()) if isinstance(container, dict) else container


def described(value: object) -> str:
    """Return the shape of a tensor, or the type of another value, in words."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def sampled(tensor: Tensor, count: int) -> Tensor:
    """Return about `count` evenly spaced numbers of a tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(len(flat) // count, 1)]


def in_reals(flat: Tensor) -> Tensor:
    """Return a tensor of real numbers: two for each complex number."""
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def signature(value: object) -> Hashable:
    """Return a key of a value's containers, tensors' shapes and dtypes, and other leaves.

    The key also has the tensors' devices and requires_grad. Values with equal keys can share a trace of the model.
    """
    leaves, structure = flatten(value)
    return structure, tuple(
        (tuple(leaf.shape), leaf.dtype, str(leaf.device), leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf), repr(leaf))
        for leaf in leaves
    )


def shown(path: Path) -> str:
    """Return the path in Python syntax, such as args[0].mask."""
    return "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in path).removeprefix(".")
