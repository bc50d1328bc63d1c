"""Fingerprints of Python values, by which changes are detected.

A fingerprint is the value of a number or string, the contents of a container, or the attributes of a config object or
dataclass. The fingerprint of a tensor, a module or another opaque object is its identity. So a tensor that is changed
in place keeps its fingerprint.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: A fingerprint compares at most this many values by content. It compares further values only by identity.
MOST = 20_000
#: If a numpy array has more bytes than this, its fingerprint has only a sample of its numbers.
WHOLE_ARRAY = 1 << 20
_PLAIN = (bool, int, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout, torch.Size)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
#: Standard library modules whose objects consist only of their attributes.
_NAMESPACES = ("types", "argparse", "dataclasses")
_LEFT_OUT = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__")


class Same:
    """A dictionary key that equals only another key of the same object.

    The key keeps the object alive, because a new object could get the `id` of a freed one.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"Same({id(self.value)})"


class Fingerprint:
    """An object that computes fingerprints of values.

    Args:
        by_content: Use the class of an opaque object instead of its identity. Then runs or ranks can be compared.
        by_version: Give a tensor a new fingerprint when it was changed in place.
    """

    def __init__(self, *, by_content: bool = False, by_version: bool = False) -> None:
        self._by_version = by_version
        self._by_content = by_content
        self._left = MOST
        self._inside: set[int] = set()

    def of(self, value: object) -> Hashable:
        """Return a hashable value that is equal for equal values."""
        match value:
            case float():
                return ("float", repr(value))
            case _ if isinstance(value, _PLAIN):
                return (type(value).__name__, value)
        self._left -= 1
        if self._left < 0 or id(value) in self._inside:
            return self._identity(value)
        self._inside.add(id(value))
        try:
            return self._look_into(value)
        except Exception:  # inspecting an object may raise any error
            return self._identity(value)
        finally:
            self._inside.discard(id(value))

    def _look_into(self, value: Any) -> Hashable:
        kind = type(value)
        match value:
            case Tensor() if self._by_content:
                return ("tensor", tuple(value.shape), str(value.dtype))
            case Tensor() if self._by_version:
                return (self._identity(value), value._version)
            case Tensor() | nn.Module() | types.ModuleType():
                return self._identity(value)
            case Mapping():
                items = tuple((self.of(key), self.of(item)) for key, item in value.items())
                return (kind.__qualname__, items, self._attributes(value))
            case list() | tuple() | deque():
                return (kind.__qualname__, tuple(map(self.of, value)), self._attributes(value))
            case AbstractSet():
                return (kind.__qualname__, tuple(sorted((self.of(item) for item in value), key=repr)))
            case types.FunctionType():
                return self._function(value)
            case _ if isinstance(value, _FUNCTIONS):
                return ("function", getattr(value, "__module__", ""), value.__qualname__)
            case types.MethodType():
                return ("method", self.of(value.__func__), self.of(value.__self__))
            case type():
                return (
                    "class",
                    f"{value.__module__}.{value.__qualname__}",
                    self._identity(value),
                    self._settings(value),
                )
        for names, read in _FOREIGN.items():
            classes = tuple(_loaded(names))
            if classes and isinstance(value, classes):
                return read(value)
        attributes = self._attributes(value) if kind.__module__ in _NAMESPACES or not is_library(kind) else ()
        return (kind.__qualname__, attributes) if attributes else self._identity(value)

    def _attributes(self, value: object) -> tuple[Hashable, ...]:
        own: dict[str, object] = dict(getattr(value, "__dict__", ()) or {})
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            own |= {name: getattr(value, name) for name in names if name not in _LEFT_OUT and hasattr(value, name)}
        return tuple((name, self.of(item)) for name, item in own.items())

    def _settings(self, kind: type) -> tuple[Hashable, ...]:
        # A class as an attribute's value may hold settings as class attributes. For a class in a container use only its name.
        if len(self._inside) > 1 or is_library(kind) or issubclass(kind, nn.Module):
            return ()
        return tuple(
            (name, self.of(item))
            for base in kind.__mro__
            if not is_library(base)
            for name, item in vars(base).items()
            if name not in _LEFT_OUT and not callable(item) and not hasattr(type(item), "__get__")
        )

    def _function(self, function: types.FunctionType) -> Hashable:
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.of(cell.cell_contents))
            except ValueError:  # the enclosing function has not set this variable yet
                cells.append(None)
        code = function.__code__
        # For a comparison between machines use only the file's name, because the folder may differ.
        file = Path(code.co_filename).name if self._by_content else code.co_filename
        where = (file, code.co_firstlineno, code.co_name)
        return ("function", where, tuple(cells), self.of(function.__defaults__), self.of(function.__kwdefaults__))

    def _identity(self, value: object) -> Hashable:
        return ("object", type(value).__qualname__) if self._by_content else Same(value)


def _array(value: Any) -> Hashable:
    step = value.nbytes // WHOLE_ARRAY + 1 if value.nbytes > WHOLE_ARRAY else 1
    return ("array", value.shape, str(value.dtype), value.reshape(-1)[::step].tobytes())


#: Class of another library, by module and name -> function that returns the fingerprint of an object of this class.
_FOREIGN: dict[tuple[str, str], Callable[[Any], Hashable]] = {
    ("numpy", "ndarray"): _array,
    ("numpy", "generic"): lambda value: ("number", str(value.dtype), repr(value)),
    ("numpy.random", "Generator"): lambda value: ("generator", repr(value.bit_generator.state)),
    ("numpy.random", "RandomState"): lambda value: ("generator", repr(value.get_state())),
    ("random", "Random"): lambda value: ("generator", hash(value.getstate())),
}


def _loaded(names: tuple[str, str]) -> Iterator[type]:
    if (module := sys.modules.get(names[0])) is not None:
        yield getattr(module, names[1])


def is_library(kind: type) -> bool:
    """Return whether a class belongs to Python or torch."""
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("torch", "numpy")
