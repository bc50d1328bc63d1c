"""A copy of a model without memory, and how to run the model itself without a trace. Loaded on use: it imports torch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.pytree import tensors_in
from paceline.parallel.tied_parameters import all_names
from paceline.parallel.tracing.fingerprint import Fingerprint, Same
from paceline.parallel.tracing.reads import plain_attributes

#: Where nn.Module keeps what is registered.
_TABLES = ("_parameters", "_buffers", "_modules")


def make_shadow(model: nn.Module, mode: Any, device: torch.device | None = None) -> tuple[nn.Module, dict[int, Tensor]]:
    """A copy of the model with fake tensors; and for those that are neither parameters nor buffers id -> the real one.

    Only for those: whoever keeps them would else keep the whole model.

    device: where parameters that have no memory yet will be.

    Raises:
        ParallelError: the model can't be copied.
    """
    memo: dict[int, Any] = {}
    plain: dict[int, Tensor] = {}
    for _, tensor in all_names(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = mode.from_tensor(_with_device(tensor, device))
    for module in model.modules():
        # Tensors in plain attributes, such as a mask or a table of angles.
        for tensor in tensors_in({name: value for name, value in vars(module).items() if name not in _TABLES}):
            if id(tensor) not in memo:
                memo[id(tensor)] = mode.from_tensor(tensor)
                plain[id(memo[id(tensor)])] = tensor
    try:
        return copy.deepcopy(model, memo), plain
    except Exception as error:
        raise ParallelError(
            f"{type(model).__name__} can't be copied (copy.deepcopy: {error}), which cutting it into stages needs. Keep files, "
            "locks and process groups out of the model's attributes."
        ) from error


def _with_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    if not tensor.is_meta or device is None:
        return tensor
    # Nobody writes to it, so no page of it is ever taken.
    shape = torch.empty_like(tensor, device=device)
    return nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape


def names_by_tensor(model: nn.Module) -> dict[int, str]:
    """A parameter's or buffer's id -> its first name."""
    return {id(tensor): name for name, tensor in reversed(all_names(model))}


def names_by_module(model: nn.Module) -> dict[int, str]:
    """A module's id -> its first name; "" for the model itself."""
    return {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}


def contents(model: nn.Module) -> dict[tuple[int, str], tuple[str, Hashable]]:
    """(module's id, attribute) -> its name in the model, and what it is: of a parameter or buffer, which tensor."""
    found: dict[tuple[int, str], tuple[str, Hashable]] = {}
    names = names_by_module(model)
    taken = Fingerprint()
    for module in model.modules():
        tables = (module._parameters, module._buffers)
        own = {key: Same(tensor) for table in tables for key, tensor in table.items()}
        plain = {key: taken.of(value) for key, value in plain_attributes(module).items()}
        for key, value in {**own, **plain}.items():
            found[id(module), key] = f"{names[id(module)]}.{key}".lstrip("."), value
    return found


class AttributeMirror:
    """Keeps the plain attributes of a copy of a model what they are in the model itself.

    The model may have been cut since the copy was made: its modules are still the user's to set attributes of.
    by_version: also what plain tensors hold.
    """

    def __init__(self, model: nn.Module, copied: nn.Module, *, by_version: bool = False) -> None:
        self._by_version = by_version
        self._pairs = list(zip(model.modules(), copied.modules(), strict=True))
        self._copied = {id(module): other for module, other in self._pairs}
        self._originals = {id(other): module for module, other in self._pairs}
        self.begin()

    def begin(self) -> None:
        """Only what changes from now on is copied."""
        self._stamps = {id(module): self._stamp(module) for module, _ in self._pairs}

    def original(self, module: nn.Module) -> nn.Module:
        """The user's module that this one is a copy of."""
        return self._originals.get(id(module), module)

    def follow(self, change: Callable[[Tensor], Tensor]) -> list[nn.Module]:
        """Copy what has changed since the last time; the copy's modules that it was in. change: a tensor -> its copy."""
        changed = []
        for module, other in self._pairs:
            stamp = self._stamp(module)
            if stamp == self._stamps[id(module)]:
                continue
            before, self._stamps[id(module)] = self._stamps[id(module)], stamp
            changed.append(other)
            for name in before.keys() - stamp.keys():
                other.__dict__.pop(name, None)
            for name in (name for name, value in stamp.items() if before.get(name) != value):
                other.__dict__[name] = self._copy(vars(module)[name], change)
        return changed

    def _copy(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        memo: dict[int, Any] = dict(self._copied)
        for module, other in self._pairs:
            for table in ("_parameters", "_buffers"):
                for name, tensor in getattr(module, table).items():
                    if tensor is not None and getattr(other, table).get(name) is not None:
                        memo[id(tensor)] = getattr(other, table)[name]
        for tensor in tensors_in(value):
            if id(tensor) not in memo:
                memo[id(tensor)] = change(tensor)
        return copy.deepcopy(value, memo)

    def _stamp(self, module: nn.Module) -> dict[str, Hashable]:
        # Each attribute has a fingerprint of its own: one covers only so many values, and a large attribute would hide
        # the others.
        return {
            name: Fingerprint(by_version=self._by_version).of(value) for name, value in plain_attributes(module).items()
        }


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """The plain attributes of all modules are put back when the block ends, what lists and dicts hold too, and forward hooks.

    Gives a function that does so at once.
    """
    saved = [(module, plain_attributes(module)) for module in model.modules()]
    # A model may put them on in its first call and keep in an attribute that it has: the one without the other would be wrong.
    hooks = [(module._forward_hooks, dict(module._forward_hooks)) for module in model.modules()]
    inside = [
        (value, copy.copy(value)) for _, own in saved for value in own.values() if type(value) in (list, dict, set)
    ]

    def put_back() -> None:
        for module, own in saved:
            for name in plain_attributes(module).keys() - own.keys():
                del module.__dict__[name]
            module.__dict__.update(own)
        for table, kept in hooks:
            table.clear()
            table.update(kept)
        for value, before in inside:
            if isinstance(value, list):
                value[:] = before
            else:
                value.clear()
                value.update(before)

    try:
        yield put_back
    finally:
        put_back()


@contextlib.contextmanager
def untouched(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Buffers, modes and random streams are put back when the block ends. training: the mode until then."""
    # Those that it is on: without a list fork_rng saves the state of every GPU, and warns of it.
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.is_cuda})
    with modes_kept(model), buffers_kept(model), torch.random.fork_rng(devices=devices):
        if training is not None:
            model.train(training)
        yield


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Each module is in the mode that it is in now when the block ends."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """The model's buffers are put back when the block ends, those in whose place others were put too."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    # A scripted module has a view of C++ in the place of this dict, and nobody can put another buffer into it.
    tables = [
        (module._buffers, dict(module._buffers)) for module in model.modules() if isinstance(module._buffers, dict)
    ]
    try:
        yield
    finally:
        for table, kept in tables:
            table.clear()
            table.update(kept)
        with torch.no_grad():
            for buffer, value in before:
                # Each write raises a tensor's version, and autograd refuses a saved tensor of another one.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
