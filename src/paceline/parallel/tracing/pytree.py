"""What a model is given and gives: tensors in tuples, lists, dicts and dataclasses. Loaded on use: it imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from torch import Tensor

#: How to come from a container to one of its values: ("item", key) is container[key], ("attr", name) is container.name.
Step = tuple[str, Any]


def tensors_at(value: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], Tensor]]:
    """Each tensor with the steps that lead to it, in order."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for step, item in _items(value):
        yield from tensors_at(item, (*path, step))


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same containers with `change` applied to each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    return rebuild(value, lambda item: map_tensors(item, change))


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with `change` applied to what it holds; a value that is no container as it is."""
    if isinstance(value, Mapping):
        return _as_mapping(type(value), {name: change(item) for name, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(change, value))
    if _is_data(value):
        fields = {item.name: change(getattr(value, item.name)) for item in dataclasses.fields(value) if item.init}
        return dataclasses.replace(value, **fields)
    return value


def signature(value: Any) -> Hashable:
    """What two batches have in common that one program computes: containers, shapes and types, and all that is no tensor."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, str(value.device), value.requires_grad)
    items = tuple((step, signature(item)) for step, item in _items(value))
    if items:
        return (type(value), items)
    return (type(value), repr(value))


def _items(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield ("item", name), item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, item in zip(value._fields, value, strict=True):
            yield ("attr", name), item
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield ("item", index), item
    elif _is_data(value):
        for field in dataclasses.fields(value):
            yield ("attr", field.name), getattr(value, field.name)


def _as_mapping(kind: type, values: dict[Any, Any]) -> Any:
    if kind is dict:
        return values
    try:
        return kind(values)
    except TypeError:
        return kind(**values)  # a dict that is a dataclass too, as the outputs of some libraries


def _is_data(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
