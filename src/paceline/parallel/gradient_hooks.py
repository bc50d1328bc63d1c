"""The user's gradient hooks: `register_hook` and `register_post_accumulate_grad_hook`.

A layout may replace the tensor that has the user's hooks. As in torch's DDP and FSDP2, each replica calls the hooks
with the gradient of its own rows, before the replicas' gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

_BEFORE, _AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"


class Hooks:
    """The user's gradient hooks on one parameter.

    After `remove()` of its handle, a hook is no longer called.
    """

    def __init__(self, *tensors: Tensor) -> None:
        # Keep only the tensors' dicts of hooks. References to the tensors would keep the whole model in memory.
        tables = ((name, getattr(tensor, name, None)) for tensor in tensors for name in (_BEFORE, _AFTER))
        self._tables = [(name, table) for name, table in tables if table is not None]
        self._later: list[Tensor] = []

    def also(self, tensor: Tensor) -> Hooks:
        """Add the present and future hooks of another tensor. Return self."""
        self._later.append(tensor)
        return self

    def __bool__(self) -> bool:
        return any(True for name in (_BEFORE, _AFTER) for _ in self._of(name))

    @property
    def after(self) -> bool:
        """Whether any hook runs after the gradient's accumulation."""
        return any(True for _ in self._of(_AFTER))

    def change(self, grad: Tensor) -> Tensor:
        """Pass the gradient through all hooks of `register_hook`."""
        # Iterate over a copy: a hook may remove itself.
        for hook in list(self._of(_BEFORE)):
            result = hook(grad)
            grad = grad if result is None else result
        return grad

    def added(self, tensor: Tensor) -> None:
        """Call all hooks of `register_post_accumulate_grad_hook` with this tensor."""
        for hook in list(self._of(_AFTER)):
            hook(tensor)

    def put_on(self, tensor: Tensor) -> None:
        """Register these hooks on another tensor."""
        if tensor.requires_grad:
            tensor.register_hook(self.change)  # type: ignore[no-untyped-call]
            tensor.register_post_accumulate_grad_hook(self.added)  # type: ignore[no-untyped-call]

    def _of(self, name: str) -> Iterator[Callable[[Tensor], Tensor | None]]:
        tables = [table for kind, table in self._tables if kind == name]
        for tensor in self._later:
            table = getattr(tensor, name, None)
            # Several tensors may share one table of hooks. Add such a table only once, so that each hook is called once.
            if table is not None and not any(table is other for other in tables):
                tables.append(table)
        for table in tables:
            # Skip Paceline's own hooks, because the tables contain Paceline's hooks as well as the user's hooks.
            yield from (hook for hook in table.values() if not getattr(hook, "__module__", "").startswith("paceline."))
