"""A copy of a model without memory, and context managers that undo a model's side effects."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.pytree import refill, tensors_in
from paceline.parallel.tied_parameters import all_names
from paceline.parallel.tracing.fingerprint import Fingerprint, Same
from paceline.parallel.tracing.reads import plain_attributes
from paceline.torch_private import FakeTensorMode

#: nn.Module's dictionaries of registered parameters, buffers and modules.
_TABLES = ("_parameters", "_buffers", "_modules")


def make_shadow(
    model: nn.Module, mode: FakeTensorMode, device: torch.device | None = None
) -> tuple[nn.Module, dict[int, Tensor]]:
    """Copy a model with fake tensors, which have shapes but no values.

    Return the copy, and {id of a fake tensor: original} for tensors that are neither parameters nor buffers. In the
    copy, `device` replaces the meta device; None keeps it.

    Raises:
        ParallelError: The model cannot be copied.
    """
    memo: dict[int, Any] = {}
    plain: dict[int, Tensor] = {}
    for tensor in dict(all_names(model)).values():
        if id(tensor) not in memo:
            memo[id(tensor)] = mode.from_tensor(_with_device(tensor, device))
    for module in model.modules():
        # Also copy tensors that are plain attributes instead of parameters or buffers, such as a mask or a table of angles.
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
    # No code writes to this tensor, so the operating system allocates no memory for it.
    shape = torch.empty_like(tensor, device=device)
    return nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape


def names_by_tensor(model: nn.Module) -> dict[int, str]:
    """Return id of a tensor -> its first name, for parameters and buffers."""
    return {id(tensor): name for name, tensor in reversed(all_names(model))}


def names_by_module(model: nn.Module) -> dict[int, str]:
    """Return id of a module -> its first name."""
    return {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}


#: (id of a module, attribute) -> (the attribute's name in the model, and the attribute's tensor or a fingerprint of its value).
Contents = dict[tuple[int, str], tuple[str, Hashable]]


def contents(model: nn.Module) -> Contents:
    contents: Contents = {}
    names = names_by_module(model)
    taken = Fingerprint()
    for module in model.modules():
        tables = (module._parameters, module._buffers)
        own = {key: Same(tensor) for table in tables for key, tensor in table.items()}
        plain = {key: taken.of(value) for key, value in plain_attributes(module).items()}
        for key, value in {**own, **plain}.items():
            contents[id(module), key] = f"{names[id(module)]}.{key}".lstrip("."), value
    return contents


class AttributeMirror:
    """An observer that copies changed attributes of modules to the model's copy.

    With `by_version`, in-place changes of tensors in attributes count too.
    """

    def __init__(self, model: nn.Module, copied: nn.Module, *, by_version: bool = False) -> None:
        self._by_version = by_version
        self._pairs = list(zip(model.modules(), copied.modules(), strict=True))
        self._copied = {id(module): other for module, other in self._pairs}
        self._originals = {id(other): module for module, other in self._pairs}
        self.begin()

    def begin(self) -> None:
        """Take the modules' present attributes as the base: `follow` copies only later changes."""
        self._stamps = {id(module): self._stamp(module) for module, _ in self._pairs}

    def original(self, module: nn.Module) -> nn.Module:
        """Return the module of which this module is a copy."""
        return self._originals.get(id(module), module)

    def follow(self, change: Callable[[Tensor], Tensor]) -> list[nn.Module]:
        """Copy attributes that changed since the last call.

        Return the copy's changed modules. `change` maps a tensor in a changed attribute to the tensor for the copy.
        """
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

    def _copy(self, value: object, change: Callable[[Tensor], Tensor]) -> object:
        memo: dict[int, Any] = dict(self._copied)
        for module, other in self._pairs:
            for table in ("_parameters", "_buffers"):
                own = {name: tensor for name, tensor in getattr(module, table).items() if tensor is not None}
                copies = {name: tensor for name, tensor in getattr(other, table).items() if tensor is not None}
                memo |= {id(own[name]): copies[name] for name in own.keys() & copies.keys()}
        memo |= {id(tensor): change(tensor) for tensor in tensors_in(value) if id(tensor) not in memo}
        return copy.deepcopy(value, memo)

    def _stamp(self, module: nn.Module) -> dict[str, Hashable]:
        # Take one fingerprint per attribute: a fingerprint has a limited number of values, so a large attribute could use it up.
        return {
            name: Fingerprint(by_version=self._by_version).of(value) for name, value in plain_attributes(module).items()
        }


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """After the block, restore modules' attributes and forward hooks.

    Yield a function that restores them within the block too.
    """
    saved = [(module, plain_attributes(module)) for module in model.modules()]
    # Restore hooks as well as attributes: a model may add a hook in its first call, and record in an attribute that it did so.
    hooks = [(module._forward_hooks, dict(module._forward_hooks)) for module in model.modules()]
    values: Iterator[Any] = (value for _, own in saved for value in own.values())
    # Skip subclasses: for example, the `copy` of a cache class may be empty, and restoring it would empty the original cache.
    inside = [(value, value.copy()) for value in values if type(value) in (list, dict, set)]

    def put_back() -> None:
        for module, own in saved:
            for name in plain_attributes(module).keys() - own.keys():
                del module.__dict__[name]
            module.__dict__.update(own)
        for table, kept in hooks:
            table.clear()
            table.update(kept)
        for value, before in inside:
            refill(value, before)

    try:
        yield put_back
    finally:
        put_back()


@contextlib.contextmanager
def untouched(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """After the block, restore buffers, training modes and random generators.

    `training` selects the mode within the block. None keeps the model's mode.
    """
    # Pass the model's devices to fork_rng, which otherwise saves the state of every GPU, and warns about this.
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.is_cuda})
    with modes_kept(model), buffers_kept(model), torch.random.fork_rng(devices=devices):
        if training is not None:
            model.train(training)
        yield


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """After the block, restore each module's training or evaluation mode."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """After the block, restore the model's buffers, even if they were replaced."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    # Skip a scripted module, whose `_buffers` is no dict but a C++ view, in which buffers can't be replaced.
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
                # Don't write unchanged values: a write changes the tensor's version, and autograd then refuses the saved tensor.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def eager() -> AbstractContextManager[object]:
    """Return a context manager that makes compiled code run uncompiled.

    Machine code would crash on fake tensors, which have no memory.
    """
    # Do nothing if torch's compiler is not loaded: no code is compiled then, and `set_stance` would load the compiler.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def fake_like(tensor: Tensor) -> Tensor:
    """Return a new fake tensor of the same shape, dtype and device."""
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return other.requires_grad_().clone() if tensor.requires_grad else other


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Silence torch's log about operations that fake tensors do not support."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
