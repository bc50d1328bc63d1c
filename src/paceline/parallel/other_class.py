"""Modules that do something of their own in forward and stay the same objects: their class is replaced. Needs no torch.

As FSDP2 does it: the parameters, buffers and hooks of a module stay, and so do the references that a script has to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def with_forward(kind: type, mark: type, forward_of: Callable[..., Any]) -> type:
    """A subclass of a module's class under the same name, with another forward; the same one for the same arguments.

    mark: mixed in, so that it is known again. forward_of: called with `kind`, the module, and what the module is called with.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward_of(kind, self, *args, **kwargs)

    made = type(kind.__name__, (mark, kind), {"forward": forward, "__module__": kind.__module__})
    made.__qualname__ = kind.__qualname__
    return made


class SharedByCopies:
    """What such a module has to know of other workers; copies of a model have the same object, for no group can be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self
