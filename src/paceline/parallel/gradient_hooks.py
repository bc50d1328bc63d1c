"""The user's hooks on gradients: `register_hook` and `register_post_accumulate_grad_hook` of a parameter. Imports torch.

They belong to the tensor that a layout may put another one in the place of. Each replica calls them with the gradient of its
own rows, before it is summed, as torch's own wrappers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

_BEFORE, _AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"


class Hooks:
    """Those of some tensors that stand for one parameter, now or later; a handle's `remove` is heard."""

    def __init__(self, *tensors: Tensor) -> None:
        # The tables of hooks are kept, and not the tensors: these are parts of the whole model, and would stay in memory.
        found = [(name, getattr(tensor, name, None)) for tensor in tensors for name in (_BEFORE, _AFTER)]
        self._tables = [(name, table) for name, table in found if table is not None]
        self._later: list[Tensor] = []

    def also(self, tensor: Tensor) -> Hooks:
        """This object, with those that the tensor is given from now on too."""
        self._later.append(tensor)
        return self

    def __bool__(self) -> bool:
        return any(True for name in (_BEFORE, _AFTER) for _ in self._of(name))

    @property
    def after(self) -> bool:
        """True if one of them is called once the gradient has been added up."""
        return any(True for _ in self._of(_AFTER))

    def change(self, grad: Tensor) -> Tensor:
        """The gradient as the hooks leave it."""
        # Over a copy: a hook may remove itself while it is called.
        for hook in list(self._of(_BEFORE)):
            result = hook(grad)
            grad = grad if result is None else result
        return grad

    def added(self, tensor: Tensor) -> None:
        """Called when `tensor.grad` is there."""
        for hook in list(self._of(_AFTER)):
            hook(tensor)

    def put_on(self, tensor: Any) -> None:
        """Let the tensor's gradient go by way of the hooks."""
        if tensor.requires_grad:
            tensor.register_hook(self.change)
            tensor.register_post_accumulate_grad_hook(self.added)

    def _of(self, name: str) -> Iterator[Callable[..., Any]]:
        tables = [table for kind, table in self._tables if kind == name]
        for tensor in self._later:
            table = getattr(tensor, name, None)
            # Several tensors may share one table, whose hooks are called once.
            if table is not None and not any(table is other for other in tables):
                tables.append(table)
        for table in tables:
            # Paceline's own hooks, which note the gradients that come, stand in the same tables.
            yield from (hook for hook in table.values() if not getattr(hook, "__module__", "").startswith("paceline."))
