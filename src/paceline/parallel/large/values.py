"""The initial values of a model without memory.

    the constructor, under `empty()`       its operations on each parameter, recorded and replayed (`recorder`)
    the modules, on the meta device        their `reset_parameters()`, recorded and replayed in the same way
    a folder of safetensors                each worker reads only its part's bytes

A worker makes one whole parameter at a time, and copies its part. So it needs memory for its own parts and for one parameter.
The values do not depend on the layout.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paceline.parallel import tied_parameters
from paceline.parallel.errors import ParallelError
from paceline.parallel.large.meta_parameters import give_memory, is_empty, region_of, slices
from paceline.parallel.large.recorder import Recorder
from paceline.parallel.large.safetensors import Folder
from paceline.parallel.reduce import local

if TYPE_CHECKING:
    from torch.storage import UntypedStorage

    from paceline.torch_private import Operation

#: A parameter of at most this many bytes keeps its initial values in memory, such as those of `nn.Parameter(torch.zeros(...))`.
KEPT_BYTES = 16 * 2**20

#: The name of the attribute by which a parameter without values refers to the recorder of its initial values.
RECORDER = "_paceline_recorder"

#: Functions of `nn.init` that do nothing for tensors on the meta device, so that no recorder would notice them.
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


def initialise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a model on the meta device its initial values.

    The values are those that `parallelize(seed=seed)` would give the model. `model` was built under
    `paceline.parallel.empty()`, or on the meta device. A model that already has values is left unchanged.

    Raises:
        ParallelError: The initial values of a parameter are unknown.

    Examples:
        >>> import torch
        >>> with pl.parallel.empty():
        ...     model = torch.nn.Linear(4, 1)
        >>> pl.parallel.initialise(model, seed=1).weight.shape
        torch.Size([1, 4])
    """
    if not is_empty(model):
        return model
    values = TensorValues(model, seed)
    values.fill_buffers(torch.device("cpu"))
    give_memory(torch.device("cpu"), model)
    values.fill(dict(model.named_parameters()))
    return model


class TensorValues:
    """The source of the initial values of a model's parameters and buffers.

    `folder` contains safetensors. With None, the constructor's operations are replayed.

    Raises:
        ParallelError: A value is unknown, or missing from the folder.
    """

    def __init__(self, model: nn.Module, seed: int, folder: str | Path | None = None) -> None:
        self._model, self._seed = model, seed
        self._folder = None if folder is None else Folder(Path(folder))
        first = tied_parameters.first_names(model)
        names: dict[str, list[str]] = {}
        for name, of_first in first.items():
            names.setdefault(of_first, []).append(name)
        self._stored: dict[str, str] = {}
        tensors = dict(tied_parameters.all_names(model))
        kept = set(model.state_dict(keep_vars=True))
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if self._folder is not None:
            prefix = getattr(model, "base_model_prefix", "")
            for name, own in names.items():
                stored = self._folder.find([*own, *(other.removeprefix(f"{prefix}.") for other in own if prefix)])
                if stored is not None:
                    self._folder.check(stored, tuple(tensors[name].shape), name)
                    self._stored[name] = stored
                elif name in params:
                    raise ParallelError(
                        f"weights={str(folder)!r} has no {name!r}, which the model has. It has, among others: "
                        f"{', '.join(self._folder.names[:5])}."
                    )
        #: Name -> parameter that has no values yet, in the model's order. A tied parameter is listed under its first name.
        self.empty = {name: tensors[name] for name in names if tensors[name].is_meta and name in params}
        self._buffers = {
            name: tensors[name]
            for name in names
            if name not in params and (tensors[name].is_meta or (name in self._stored and name in kept))
        }
        self._shells = {
            name: tensor
            for name, tensor in {**self.empty, **self._buffers}.items()
            if tensor.is_meta and name not in self._stored
        }
        self._recorders = _recorders(model, self._shells)
        self._names = {
            tensor.untyped_storage()._cdata: name
            for name, tensor in tensors.items()
            if tensor.is_meta and name in names
        }

    def fill_buffers(self, device: torch.device) -> None:
        """Give the model's buffers their initial values."""
        for name, buffer in self._buffers.items():
            value = self.whole(name)
            if not buffer.is_meta:
                with torch.no_grad():
                    buffer.copy_(value)
                continue
            value = value.to(device)
            for other, tensor in tied_parameters.all_names(self._model):
                if tensor is buffer:
                    owner, last = tied_parameters.owner_of(self._model, other)
                    owner._buffers[last] = value

    def fill(self, params: dict[str, nn.Parameter]) -> None:
        """Give this rank's parameters, or parts of them, their initial values."""
        with torch.no_grad():
            for name, param in params.items():
                own = local(param)
                if name in self._stored:
                    assert self._folder is not None
                    if own.numel():
                        own.copy_(self._folder.read(self._stored[name], region_of(param)))
                elif name in self.empty and own.numel():
                    own.copy_(self.whole(name)[slices(region_of(param))])

    @property
    def source(self) -> str:
        """A sentence about the source of new values, "" if all values are the user's."""
        if self._folder is not None:
            return f"weights of {self._folder.path}: each worker has read its own part"
        if not self.empty:
            return ""
        return f"{len(self.empty)} parameters were made by each worker for its own part, seeded by name (seed {self._seed})"

    def whole(self, name: str) -> Tensor:
        if name in self._stored:
            assert self._folder is not None
            return self._folder.read(self._stored[name])
        shell = self._shells[name]
        recorder = next(recorder for recorder in self._recorders if recorder.knows(shell))
        return recorder.value(shell, name, self._seed, self._names)


def _recorders(model: nn.Module, unknown: dict[str, Tensor]) -> list[Recorder]:
    """Return recorders that initialise the tensors `unknown`, or raise ParallelError."""
    if not unknown:
        return []
    own_ones = (getattr(tensor, RECORDER, None) for _, tensor in tied_parameters.all_names(model))
    recorders: list[Recorder] = list({id(recorder): recorder for recorder in own_ones if recorder is not None}.values())
    left = [name for name, tensor in unknown.items() if not any(own.knows(tensor) for own in recorders)]
    for name in left:
        # Refuse a tensor that was converted or replaced after its recording: `reset_parameters` might set other values.
        if hasattr(unknown[name], RECORDER) and not any(own.began(unknown[name]) for own in recorders):
            raise ParallelError(
                f"{name} was built under paceline.parallel.empty(), and converted or replaced since, so how its values are "
                "made is not known any more. Convert the model (.to(dtype), .double()) within the block."
            )
    if left:
        recorders.append(_reset(model, {name.rpartition(".")[0] for name in left}))
    for name in left:
        if not recorders[-1].knows(unknown[name]):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise ParallelError(
                f"{name} has no values, and {owner} does not say how they are made (reset_parameters()). Build the model under "
                "`with paceline.parallel.empty():`, which records the calls of its constructor, convert it (.to(dtype)) within "
                "that block, or give parallelize(weights=<folder of safetensors>)."
            )
    return recorders


def _reset(model: nn.Module, owners: Iterable[str]) -> Recorder:
    recorder, wanted = Recorder(), set(owners)
    with recorder, noted(recorder), torch.no_grad():
        modules = [module for name, module in model.named_modules() if name in wanted]
        for module in modules:
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
        # Call the model's `_init_weights`, a method by which many models, such as Hugging Face's, initialise their modules.
        own = getattr(model, "_init_weights", None)
        if callable(own):
            for module in modules:
                own(module)
    return recorder


@contextlib.contextmanager
def empty() -> Iterator[None]:
    """Build modules without memory for parameters; `parallelize` makes each worker's part.

        with paceline.parallel.empty():
            model = Model(config)
        optimizer = torch.optim.AdamW(model.parameters())
        par = paceline.parallelize(model, optimizer, loader, loss=..., strategy=FullyShard())

    The constructor's operations on parameters (`nn.init`, `reset_parameters`, `model.apply(...)`) are recorded, and replayed
    when `parallelize` makes the values. All other objects (buffers, numbers, lists) are made at once. A parameter's random
    numbers depend only on its name and on the seed of `parallelize`. So they are the same in every layout and after
    `initialise(model, seed)`, but differ from the constructor's numbers outside of this block. A parameter of up to 16
    MiB that is made with values, such as `nn.Parameter(torch.zeros(8))`, keeps rank 0's values.

    Raises:
        ParallelError: The constructor reads missing values, or makes a parameter of more than 16 MiB with unequal values.
            Make it with `torch.empty`, and fill it afterwards.

    Examples:
        >>> import torch
        >>> with pl.parallel.empty():
        ...     model = torch.nn.Linear(1000, 1000)
        >>> model.weight.device.type
        'meta'
    """
    recorder = _Blank()
    taken: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}
    own = threading.get_ident()

    def registered(module: nn.Module, name: str, param: object) -> Any:
        # torch calls this hook for all modules of the process. Skip modules that other threads build.
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
                # If `value` is set, all numbers of the parameter equal `value`: record an operation that fills the parameter.
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
    """Within the block, record calls of `nn.init` functions on meta tensors."""
    functions = {name: getattr(nn.init, name) for name in _SILENT if hasattr(nn.init, name)}

    def noting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def note(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
            if not tensor.is_meta:
                return function(tensor, *args, **kwargs)
            own = {key: value for key, value in kwargs.items() if key != "generator"}
            recorder.note(function, tensor, *args, is_random=True, **own)
            return tensor

        return note

    for name, function in functions.items():
        setattr(nn.init, name, noting(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(nn.init, name, function)


_KEPT = object()


class _Blank(Recorder):  # type: ignore[no-untyped-call]
    """A recorder that also recognises uninitialised tensors with memory (`torch.empty`)."""

    def __init__(self) -> None:
        super().__init__()
        self._blank: dict[int, weakref.ref[UntypedStorage]] = {}

    def made(self, function: Operation, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if function in _BLANK:
                self._blank[storage._cdata] = weakref.ref(storage)
            elif function._schema.is_mutable:
                self._blank.pop(storage._cdata, None)

    def value_before(self, param: nn.Parameter, name: str) -> object:
        """Return the value that a parameter had when the module registered it.

        The result is None for an uninitialised parameter, a number if all its values are equal, and the marker `_KEPT` for
        a small parameter, whose values stay in memory.
        """
        storage = param.untyped_storage()
        # Compare the storage objects as well as the addresses, because a new storage may reuse an address.
        if self._blank.get(storage._cdata, lambda: None)() is storage:
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
