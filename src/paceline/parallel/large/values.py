"""Where the values of a model without memory come from, and how each worker gets its own part. Loaded on use: imports torch.

    the constructor, under `empty()`       what it did to each parameter, done again, from a stream of the parameter's name
    the modules, on the meta device        their own `reset_parameters()`, noted and done in the same way
    a folder of safetensors                the part's bytes are read, and no others

A parameter is made whole, one at a time, on each worker that has a part of it, and the part is kept. So a worker needs the memory
of its own parts and of one parameter; what is made does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel import ties
from paceline.parallel.errors import ParallelError
from paceline.parallel.large.empty import RECORDER, noted
from paceline.parallel.large.parts import give_memory, is_empty, region_of, slices
from paceline.parallel.large.recorder import Recorder
from paceline.parallel.large.safetensors import Folder
from paceline.parallel.reduce import local


def initialise(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same model with all its values, in one process: those that `parallelize(seed=seed)` gives its workers their parts of.

    model: built under `paceline.parallel.empty()`, or on the meta device. Left as it is if it has its values already.

    Raises:
        ParallelError: the values of a parameter are not known.
    """
    if not is_empty(model):
        return model
    values = TensorValues(model, seed)
    values.fill_buffers(torch.device("cpu"))
    give_memory(torch.device("cpu"), model)
    values.fill(dict(model.named_parameters()))
    return model


class TensorValues:
    """The values of a model's parameters and buffers, by first name, before it is cut.

    folder: of safetensors; None for those that the constructor gives.

    Raises:
        ParallelError: the values of one are not known, or the folder has not what the model needs.
    """

    def __init__(self, model: nn.Module, seed: int, folder: str | Path | None = None) -> None:
        self._model, self._seed = model, seed
        self._folder = None if folder is None else Folder(Path(folder))
        first = ties.first_names(model)
        names: dict[str, list[str]] = {}
        for name, of_first in first.items():
            names.setdefault(of_first, []).append(name)
        self._stored: dict[str, str] = {}
        tensors = dict(ties.all_names(model))
        kept = set(model.state_dict(keep_vars=True))
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if self._folder is not None:
            prefix = getattr(model, "base_model_prefix", "")
            for name, own in names.items():
                found = self._folder.find([*own, *(other.removeprefix(f"{prefix}.") for other in own if prefix)])
                if found is not None:
                    self._folder.check(found, tuple(tensors[name].shape), name)
                    self._stored[name] = found
                elif name in params:
                    raise ParallelError(
                        f"weights={str(folder)!r} has no {name!r}, which the model has. It has, among others: "
                        f"{', '.join(self._folder.names[:5])}."
                    )
        #: First names of parameters that are made, in the model's order; of all, those that have memory keep their values.
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
        """Give the buffers their values; they are whole on every worker until the model is cut."""
        for name, buffer in self._buffers.items():
            value = self.whole(name)
            if not buffer.is_meta:
                with torch.no_grad():
                    buffer.copy_(value)
                continue
            value = value.to(device)
            for other, tensor in ties.all_names(self._model):
                if tensor is buffer:
                    owner, last = ties.owner_of(self._model, other)
                    owner._buffers[last] = value

    def fill(self, params: dict[str, nn.Parameter]) -> None:
        """Give this rank's parameters, which have memory now, the values of their parts. params: by first name."""
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
        """In words; "" where the model has all its values."""
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
    """Those that know how the tensors are made."""
    if not unknown:
        return []
    found: dict[int, Recorder] = {}
    for _, tensor in ties.all_names(model):
        recorder: Any = getattr(tensor, RECORDER, None)
        if recorder is not None:
            found[id(recorder)] = recorder
    recorders = list(found.values())
    left = [name for name, tensor in unknown.items() if not any(own.knows(tensor) for own in recorders)]
    for name in left:
        # What its constructor did can't be found again, and its module's own first values may be others.
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
                "`with paceline.parallel.empty():`, which notes what its constructor does, convert it (.to(dtype)) within that "
                "block, or give parallelize(weights=<folder of safetensors>)."
            )
    return recorders


def _reset(model: nn.Module, owners: Iterable[str]) -> Recorder:
    """Notes what these modules do when they are asked for their first values, and the whole model's own `_init_weights`."""
    recorder, wanted = Recorder(), set(owners)
    with recorder, noted(recorder), torch.no_grad():
        for name, module in model.named_modules():
            reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if name in wanted and callable(reset):
                reset()
        own: Any = getattr(model, "_init_weights", None)
        if callable(own):
            # By this name Hugging Face's models, and many others, have the function that they apply to each module.
            for name, module in model.named_modules():
                if name in wanted:
                    own(module)
    return recorder
