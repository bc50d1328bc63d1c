"""Modules that do something of their own in forward and stay the same objects: their class is replaced. Needs no torch.

As FSDP2 does it: the parameters, buffers and hooks of a module stay, and so do the references that a script has to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def give_forward(module: Any, mark: type, forward_of: Callable[..., Any]) -> None:
    """Let the module have another forward, by a subclass of its class under the same name.

    mark: mixed in, so that it is known again. forward_of: called with the former class, the module, and what the module is
        called with, which may have any names: its own two go by position alone.
    """
    kind: Any = type(module)
    module.__class__ = _subclass(kind, mark, forward_of)


@cache
def _subclass(kind: type, mark: type, forward_of: Callable[..., Any]) -> type:
    # One for all modules of a class: code that goes by the class of a block, as the search for alike ones, sees one class.
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return forward_of(kind, self, *args, **kwargs)

    made = type(kind.__name__, (mark, kind), {"forward": forward, "__module__": kind.__module__})
    made.__qualname__ = kind.__qualname__
    return made


class SharedByCopies:
    """What such a module has to know of other workers; copies of a model have the same object, for no group can be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self
