"""Containers taken apart into leaves, and put together from leaves again. Loaded on use: it imports torch.

    {"x": [a, b], "y": c}   ->   [a, b, c]   and a Structure: dict("x": list(leaf, leaf), "y": leaf)

A container is a mapping, a tuple, a named tuple, a list or a dataclass, of any class; all else is a leaf, None too.
`torch.utils._pytree` and optree take a dataclass, a UserDict or a subclass of dict for a leaf unless somebody has registered
its class for the whole process, and optree sorts the keys of a dict.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: A way from a container to one of its values: ("item", key) is container[key], ("attr", name) is container.name.
Step = tuple[str, Any]
Path = tuple[Step, ...]


@dataclass(frozen=True)
class Container:
    """A container without its values.

    kind: its class. steps: one to each of its values, in order. factory: that of a defaultdict.
    """

    kind: Any
    steps: Path
    factory: Any = None

    def make(self, values: Iterable[Any]) -> Any:
        """A container of the same class that holds these values.

        A dataclass is made by a call of its class: fields with init=False are what that computes, and not the values given.
        """
        kind, names = self.kind, [name for _, name in self.steps]
        if issubclass(kind, Mapping):
            return self._mapping(dict(zip(names, values, strict=True)))
        if issubclass(kind, (tuple, list)):
            # A named tuple takes its values one by one, any other tuple or list takes one iterable.
            return kind(*values) if hasattr(kind, "_fields") else kind(values)
        given = dict(zip(names, values, strict=True))
        return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind) if field.init})

    def _mapping(self, values: dict[Any, Any]) -> Any:
        if self.kind is dict:
            return values
        if issubclass(self.kind, defaultdict):
            return self.kind(self.factory, values)
        try:
            return self.kind(values)
        except TypeError:
            pass
        try:
            # A mapping that is a dataclass too, such as the outputs of some libraries.
            return self.kind(**values)
        except TypeError:
            # No way to make one fits: a plain dict has the values at least.
            return values


@dataclass(frozen=True)
class Structure:
    """The containers of a value, which hold places for leaves. Equal to that of a value with the same containers.

    container: None for a leaf. parts: the structure of each of the container's values.
    """

    container: Container | None = None
    parts: tuple[Structure, ...] = ()

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """A value with this structure and these leaves, which are as many as it has places."""
        return self._made(iter(leaves))

    def _made(self, leaves: Iterator[Any]) -> Any:
        if self.container is None:
            return next(leaves)
        return self.container.make([part._made(leaves) for part in self.parts])

    def paths(self) -> Iterator[Path]:
        """The way to each leaf, in order."""
        if self.container is None:
            yield ()
            return
        for step, part in zip(self.container.steps, self.parts, strict=True):
            for path in part.paths():
                yield (step, *path)


_LEAF = Structure()


def open_container(value: Any) -> tuple[Container, tuple[Any, ...]] | None:
    """The container and the values that it holds; None if `value` is a leaf."""
    kind = type(value)
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        steps = tuple(("item", key) for key in value)
        factory = value.default_factory if isinstance(value, defaultdict) else None
        return Container(kind, steps, factory), tuple(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Container(kind, tuple(("attr", name) for name in value._fields)), tuple(value)
    if isinstance(value, (tuple, list)):
        return Container(kind, tuple(("item", index) for index in range(len(value)))), tuple(value)
    # is_dataclass says yes to the class itself, too.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return Container(kind, tuple(("attr", name) for name in names)), tuple(getattr(value, name) for name in names)
    return None


def flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """The leaves in order, and the structure around them. is_leaf: says of a container that it is not to be opened."""
    leaves: list[Any] = []

    def structure(item: Any) -> Structure:
        opened = None if is_leaf is not None and is_leaf(item) else open_container(item)
        if opened is None:
            leaves.append(item)
            return _LEAF
        return Structure(opened[0], tuple(map(structure, opened[1])))

    return leaves, structure(value)


def map_leaves(value: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The same containers with `change` applied to each leaf."""
    leaves, structure = flatten(value, is_leaf)
    return structure.rebuild(map(change, leaves))


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same containers with `change` applied to each tensor."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor, in order."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def tensors_at(value: Any) -> list[tuple[Path, Tensor]]:
    """Every tensor with the way to it, in order."""
    leaves, structure = flatten(value)
    return [(path, leaf) for path, leaf in zip(structure.paths(), leaves, strict=True) if isinstance(leaf, Tensor)]


def sampled(tensor: Tensor, count: int) -> Tensor:
    """At least so many numbers of the tensor, spread over all of it, if it has as many."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(len(flat) // count, 1)]


def in_reals(flat: Tensor) -> Tensor:
    """These numbers; complex ones as two real ones each."""
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def signature(value: Any) -> Hashable:
    """A key that two values share if one program computes both: containers, shapes and types, and all that is no tensor."""
    leaves, structure = flatten(value)
    return structure, tuple(
        (tuple(leaf.shape), leaf.dtype, str(leaf.device), leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf), repr(leaf))
        for leaf in leaves
    )


def shown(path: Path) -> str:
    """The way as Python writes it: args[0].mask."""
    return "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in path).removeprefix(".")
