"""Replace the forward of a module by swapping its class, and call custom autograd functions.

The module gets a subclass of its class and stays the same object, as in FSDP2. Its parameters, buffers and hooks stay, and the
script's references to it stay valid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

#: A function that replaces a module's forward. Arguments: the module's former class, the module, and the call's arguments.
Forward = Callable[..., object]


def give_forward(module: nn.Module, mark: type, forward_of: Forward) -> None:
    """Replace a module's forward by swapping its class for a subclass.

    Args:
        module: Changed in place.
        mark: A base class of the subclass, by which `isinstance` recognises the module.
        forward_of: The new forward: (former class, module, arguments of the call) -> result.
    """
    kind: type = type(module)
    module.__class__ = _subclass(kind, mark, forward_of)


@cache
def _subclass(kind: type, mark: type, forward_of: Forward) -> type:
    # The function is cached, so that modules of one class get the same subclass: the search for similar blocks compares classes.
    def forward(self: nn.Module, /, *args: object, **kwargs: object) -> object:
        return forward_of(kind, self, *args, **kwargs)

    made = type(kind.__name__, (mark, kind), {"forward": forward, "__module__": kind.__module__})
    made.__qualname__ = kind.__qualname__
    return made


def apply_function(function: type[torch.autograd.Function], *args: object) -> Any:
    """Call a custom autograd function. Its `apply` has no annotation in torch."""
    apply: Callable[..., object] = function.apply
    return apply(*args)


class SharedByCopies:
    """A base class of objects that deepcopy does not copy."""

    def __deepcopy__(self, memo: object) -> object:
        return self
