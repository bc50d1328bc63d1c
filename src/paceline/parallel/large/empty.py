"""Build a model without memory for its parameters: `paceline.parallel.empty()`. Loaded on use: it imports torch."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paceline.parallel.errors import ParallelError
from paceline.parallel.large.recorder import Recorder

#: A parameter that has its values before it is the model's (`nn.Parameter(torch.zeros(...))`) keeps them up to this size.
KEPT_BYTES = 16 * 2**20

#: The attribute of a parameter without values that says who knows how they are made.
RECORDER = "_paceline_recorder"

#: They return at once where a tensor is on the meta device; the first is what `trunc_normal_` calls.
_SILENT = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")

_BLANK = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )
)


@contextlib.contextmanager
def empty() -> Iterator[None]:
    """Parameters of modules made in this block take no memory; `parallelize` makes their values, each worker its own part.

        with paceline.parallel.empty():
            model = Model(config)
        optimizer = torch.optim.AdamW(model.parameters())
        par = paceline.parallelize(model, optimizer, loader, loss=..., strategy=FullyShard())

    What the constructor does to parameters (`nn.init`, `reset_parameters`, `model.apply(...)`) is noted and done when the
    values are made; all else (buffers, numbers, lists) is made at once, as always. Random numbers of a parameter follow from
    the seed of `parallelize` and the parameter's name, so they are the same on every layout, and in one process, which takes
    `initialise(model, seed)`. They are not those of the same constructor outside of this block. A parameter that is made
    with its values, such as `nn.Parameter(torch.zeros(8))`, keeps them up to 16 MiB; rank 0's are taken.

    Raises:
        ParallelError: the constructor reads values that are not there, or makes a parameter of more than 16 MiB with
            unequal values: make it of `torch.empty`, and fill it afterwards.
    """
    recorder = _Blank()
    taken: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}
    own = threading.get_ident()

    def registered(module: nn.Module, name: str, param: Any) -> Any:
        # torch has this hook for all modules of the process, also for those that other threads make.
        if threading.get_ident() != own or type(param) is not nn.Parameter:
            return None
        if param.is_meta:
            setattr(param, RECORDER, recorder)
            return None
        before = taken.get(id(param))
        if before is not None and before[0]() is param:
            return before[1]
        with recorder.off():
            value = recorder.value_before(param, f"{type(module).__name__}.{name}")
            if value is _KEPT:
                return None
            shell = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            recorder.begin(shell)
            if value is not None:
                # Noted that all of it has this value.
                recorder.note(torch.ops.aten.fill_.Scalar, shell, value)
        setattr(shell, RECORDER, recorder)
        taken[id(param)] = weakref.ref(param), shell
        return shell

    handle = register_module_parameter_registration_hook(registered)
    try:
        with recorder, noted(recorder):
            yield
    finally:
        handle.remove()


@contextlib.contextmanager
def noted(recorder: Recorder) -> Iterator[None]:
    """Those functions of `nn.init` that do nothing to a tensor without memory are noted as they are called."""
    found = {name: getattr(nn.init, name) for name in _SILENT if hasattr(nn.init, name)}

    def noting(function: Any) -> Any:
        def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not tensor.is_meta:
                return function(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            own = {key: value for key, value in kwargs.items() if key != "generator"}
            recorder.note(function, tensor, *args, is_random=True, **own)
            return tensor

        return note

    for name, function in found.items():
        setattr(nn.init, name, noting(function))
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(nn.init, name, function)


_KEPT: Any = object()


class _Blank(Recorder):  # type: ignore[no-untyped-call]
    """Knows also which tensors with memory nobody has written to, as those of `torch.empty`."""

    def __init__(self) -> None:
        super().__init__()
        self._blank: dict[int, weakref.ref[Any]] = {}

    def made(self, function: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if function in _BLANK:
                self._blank[storage._cdata] = weakref.ref(storage)
            elif function._schema.is_mutable:
                self._blank.pop(storage._cdata, None)

    def value_before(self, param: nn.Parameter, name: str) -> Any:
        """None for a parameter that nobody has written to; the value that all of it has; or `_KEPT`."""
        storage = param.untyped_storage()
        found = self._blank.get(storage._cdata)
        # By the object too, for an address is used again.
        if found is not None and found() is storage:
            return None
        if param.nbytes <= KEPT_BYTES:
            return _KEPT
        least, most = torch.aminmax(param.detach())
        if least == most:
            return float(least)
        raise ParallelError(
            f"{name} ({param.nbytes / 2**20:.0f} MiB) has values before it is the model's, and under "
            "paceline.parallel.empty() they would be kept in memory. Write nn.Parameter(torch.empty(...)), and fill it "
            "afterwards (nn.init.normal_(self.weight))."
        )
