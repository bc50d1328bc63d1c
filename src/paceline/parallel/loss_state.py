"""The state of a loss between its calls, and the model's tensors that a loss reads.

Paceline also calls the loss for its own purposes: to compare layouts, and in trials before a model is cut. Afterwards it
restores this state:

    self.calls += 1            an attribute of a loss that is an object, or a bound method
    self.mean.lerp_(x, 0.1)    a buffer, a parameter and its gradient, any other tensor
    nonlocal calls             a variable of an enclosing function
    CALLS, HISTORY             a global variable that the loss or a helper in the script uses

A loss may read tensors other than output and target. In a cut model such a tensor may be in another process, or split:

    0.1 * model.last.weight.square().sum()     a parameter or a buffer
    sum(block.aux for block in model.blocks)   a tensor that the forward pass has stored, with or without a gradient
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel.full_tensor import is_part
from paceline.parallel.pytree import Changeable, refill, tensors_in
from paceline.parallel.reduce import local
from paceline.parallel.tied_parameters import all_names
from paceline.parallel.tracing.reads import plain_attributes
from paceline.parallel.tracing.source import Line, is_users, users_line
from paceline.torch_private import lost_arguments

#: For a container with more items than this, record only which items the container has, but not the contents of the items.
MANY = 1000
#: The search for a loss's state visits at most this many objects.
MOST = 20_000
#: The most bytes to copy: COPIED_BYTES for all tensors and arrays together, SMALL_BYTES for each single frozen parameter.
COPIED_BYTES, SMALL_BYTES = 1 << 28, 1 << 16
_TABLES = ("_parameters", "_buffers", "_modules")


Number = int | float | Tensor


class LossState:
    """A snapshot of the variables that a loss can reach.

    Attributes:
        numbers: Name -> number, or copy of a tensor, to compare with a later snapshot.
        iterators: Names of iterators, which cannot be restored.
    """

    def __init__(self, loss: Callable[..., object], model: nn.Module) -> None:
        self.numbers: dict[str, Number] = {}
        self.iterators: list[str] = []
        self._put_back: list[Callable[[], None]] = []
        self._left_bytes = COPIED_BYTES
        # Keep the visited objects alive, because a new object could get the id of a freed object.
        self._seen: dict[int, object] = {
            id(value): value for value in (*model.modules(), *dict(all_names(model)).values())
        }
        self._look(loss, getattr(loss, "__qualname__", type(loss).__qualname__))

    def put_back(self) -> None:
        """Restore the loss's variables to their values in this snapshot."""
        for put_back in self._put_back:
            put_back()

    def _look(self, value: object, name: str) -> None:
        if isinstance(value, (int, float)):
            self.numbers[name] = value
        if (
            value is None
            or isinstance(value, (int, float, complex, str, bytes, type, types.ModuleType))
            or id(value) in self._seen
            or len(self._seen) > MOST
        ):
            return
        self._seen[id(value)] = value
        # Skip objects that can't be inspected, for example a proxy outside of its context, which may raise any error.
        with contextlib.suppress(Exception):
            self._look_closer(value, name)

    def _look_closer(self, value: object, name: str) -> None:
        match value:
            case Tensor():
                self._keep_tensor(value, name)
            case functools.partial():
                for part in (value.func, value.args, value.keywords):
                    self._look(part, name)
            case types.MethodType():
                self._look(value.__func__, name)
                self._look_into(getattr(value.__self__, "__dict__", {}), name)
            case types.FunctionType():
                self._look_at_function(value)
            case dict() | list() | set() | deque() | tuple():
                self._look_into(value, name)
            case _ if type(value).__module__ == "numpy" and hasattr(value, "nbytes") and hasattr(value, "flat"):
                self._keep_array(value)
            case _ if hasattr(type(value), "__next__"):
                self.iterators.append(name)
            case _ if hasattr(value, "__dict__") and (isinstance(value, nn.Module) or _is_of_script(type(value))):
                self._look_into(vars(value), name)

    def _look_into(self, value: Changeable | tuple[object, ...], name: str) -> None:
        if not isinstance(value, tuple):
            before = dict(value) if isinstance(value, dict) else list(value)
            self._put_back.append(functools.partial(refill, value, before))
        if len(value) > MANY:
            return
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            # Name a module's tensor "weight", not "_parameters.weight".
            self._look(item, name + ("" if key in _TABLES else f".{key}" if isinstance(value, dict) else f"[{key}]"))

    def _look_at_function(self, function: types.FunctionType) -> None:
        if not is_users(function.__code__.co_filename):
            return
        self._look_into(vars(function), function.__qualname__)
        self._look(function.__defaults__, function.__qualname__)
        self._look(function.__kwdefaults__, function.__qualname__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # raises ValueError if the closure's cell is empty
                before = cell.cell_contents
                self._put_back.append(functools.partial(setattr, cell, "cell_contents", before))
                self._look(before, f"{name} of {function.__qualname__}")
        own = function.__globals__
        for name in sorted(_names_in(function.__code__) & own.keys()):
            self._put_back.append(functools.partial(own.__setitem__, name, own[name]))
            self._look(own[name], name)

    def _keep_tensor(self, tensor: Tensor, name: str) -> None:
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        own = local(tensor.detach())
        # Skip a tensor on the "meta" device, which has no values: a user's hook may have stored it during the trace of the model.
        has_values = own.untyped_storage().device.type != "meta"
        if not has_values or (is_frozen and tensor.nbytes > SMALL_BYTES) or not self._may_copy(tensor.nbytes):
            return
        grad = tensor.grad if tensor.is_leaf else None
        before, before_grad = own.clone(), None if grad is None else grad.clone()
        self.numbers[name] = before

        def put_back() -> None:
            with torch.no_grad():
                # Don't write unchanged values: a write changes the tensor's version, and autograd then refuses the saved tensor.
                if not torch.equal(own, before):
                    own.copy_(before)
                if tensor.is_leaf and (tensor.grad is not None or grad is not None):
                    tensor.grad = grad
                    if grad is not None and before_grad is not None:
                        grad.copy_(before_grad)

        self._put_back.append(put_back)

    def _keep_array(self, array: Any) -> None:
        if not array.flags.writeable or not self._may_copy(array.nbytes):
            return
        before = array.copy()
        self._put_back.append(lambda: array.__setitem__(..., before))

    def _may_copy(self, size: int) -> bool:
        if size > self._left_bytes:
            return False
        self._left_bytes -= size
        return True


@contextlib.contextmanager
def loss_kept(loss: Callable[..., object], model: nn.Module) -> Iterator[LossState]:
    """After the block, restore the state that the loss can reach."""
    state = LossState(loss, model)
    try:
        yield state
    finally:
        state.put_back()


def _names_in(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _is_of_script(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    # Treat classes of `types` and `argparse` as the script's: their objects have only attributes that the script sets.
    return kind.__module__ in ("__main__", "types", "argparse") or (file is not None and is_users(file))


class LossReads(TorchFunctionMode):
    """A torch function mode that records a loss's reads of the model.

    Attributes:
        state: Name of a parameter or buffer -> the line of code that reads it.
        left: Module attribute in which a forward pass has stored a tensor -> the line that reads the tensor.
        parts: Name of a parameter or buffer that is split over workers -> the line that reads it.
    """

    def __init__(self, model: nn.Module, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.state: dict[str, Line | None] = {}
        self.left: dict[str, Line | None] = {}
        self.parts: dict[str, Line | None] = {}
        self._model = model
        self._before = {id(tensor): tensor for tensor in before}
        # Keep the tensors alive, because a new tensor could get the id of a freed tensor.
        self._own: dict[int, Tensor] = {}
        self.look_again()

    def look_again(self) -> None:
        """Look up the model's tensors again, after another forward pass."""
        self._own.clear()
        self._names = {id(tensor): name for name, tensor in reversed(all_names(self._model))}
        self._left = {id(tensor): name for name, tensor in attributes_of(self._model) if id(tensor) not in self._before}

    def may_read(self, *values: object) -> None:
        """Do not record later reads of the tensors in `values`."""
        self._own.update((id(tensor), tensor) for tensor in tensors_in(values))

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = (kwargs or {}) | lost_arguments(func)
        for tensor in (tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in self._own):
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
    """Return (name, tensor) of tensors in modules' attributes, without parameters and buffers."""
    return [
        (f"{name}.{attribute}".lstrip("."), tensor)
        for name, module in model.named_modules()
        for attribute, value in plain_attributes(module).items()
        for tensor in tensors_in(value)
    ]
