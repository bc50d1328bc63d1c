"""What a loss reads beside the output and the target: the model's own tensors. Loaded on use: it imports torch.

    0.1 * model.last.weight.square().sum()     a parameter or a buffer
    sum(block.aux for block in model.blocks)   what a call of the model has left, with a gradient or without

In one process all of that is at hand. Where a model is cut, it may be in another process, or there in part alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel.full_tensor import is_part
from paceline.parallel.pytree import tensors_in
from paceline.parallel.ties import all_names
from paceline.parallel.tracing.reads import plain_attributes
from paceline.parallel.tracing.source import Line, users_line
from paceline.torch_private import lost_arguments


class LossReads(TorchFunctionMode):
    """Active while a loss is computed, on the tensors of this process.

    state: names of the parameters and buffers that it reads. left: what calls of the model have left -> the line that reads it.
    parts: names of those that are in parts, each worker having one.
    """

    def __init__(self, model: nn.Module, before: Iterable[Tensor] = ()) -> None:
        """before: the tensors that the model's modules had as plain attributes before the call; see `attributes_of`."""
        super().__init__()
        self.state: dict[str, Line | None] = {}
        self.left: dict[str, Line | None] = {}
        self.parts: dict[str, Line | None] = {}
        self._model = model
        self._before = {id(tensor): tensor for tensor in before}
        # Held, for another tensor could else get the same identity.
        self._own: dict[int, Tensor] = {}
        self.look_again()

    def look_again(self) -> None:
        """Know what the model has now, after another call."""
        self._own.clear()
        self._names = {id(tensor): name for name, tensor in reversed(all_names(self._model))}
        self._left = {id(tensor): name for name, tensor in attributes_of(self._model) if id(tensor) not in self._before}

    def may_read(self, *values: Any) -> None:
        """These, such as the output and the target, are what a loss is for."""
        self._own.update((id(tensor), tensor) for tensor in tensors_in(values))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = (kwargs or {}) | lost_arguments(func)
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self._own:
                continue
            name = self._names.get(id(tensor))
            if name is not None:
                self.state.setdefault(name, users_line())
                if is_part(tensor):
                    self.parts.setdefault(name, users_line())
            elif id(tensor) in self._left or tensor.grad_fn is not None:
                self.left.setdefault(self._left.get(id(tensor), ""), users_line())
        result = func(*args, **kwargs)
        self.may_read(result)
        return result


def attributes_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors that the modules have as plain attributes, with their names."""
    return [
        (f"{name}.{attribute}".lstrip("."), tensor)
        for name, module in model.named_modules()
        for attribute, value in plain_attributes(module).items()
        for tensor in tensors_in(value)
    ]
