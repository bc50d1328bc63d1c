"""Modules with another forward that stay the same objects, by a subclass of their class.

FSDP2 does the same. The module's parameters, buffers and hooks stay, and the script's references to it stay valid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def give_forward(module: object, mark: type, forward_of: Callable[..., Any]) -> None:
    """Replace a module's forward by swapping its class for a subclass of the same name.

    Args:
        module: Changed in place.
        mark: A class to mix in, by which the module can be recognised.
        forward_of: Called with the former class, the module, and the module's arguments. Its own two parameters are positional.
    """
    kind: Any = type(module)
    module.__class__ = _subclass(kind, mark, forward_of)


@cache
def _subclass(kind: type, mark: type, forward_of: Callable[..., Any]) -> type:
    # One subclass for all modules of a class, because the search for similar blocks compares classes.
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return forward_of(kind, self, *args, **kwargs)

    made = type(kind.__name__, (mark, kind), {"forward": forward, "__module__": kind.__module__})
    made.__qualname__ = kind.__qualname__
    return made


class SharedByCopies:
    """Knowledge about other workers that copies of a module share."""

    def __deepcopy__(self, memo: object) -> object:
        return self
