"""A copy of a model without memory, and how to run the model itself without a trace. Loaded on use: it imports torch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.ties import all_names
from paceline.parallel.tracing.containers import tensors_at

#: Where nn.Module keeps what is registered.
_TABLES = ("_parameters", "_buffers", "_modules")


def make_shadow(model: nn.Module, mode: Any) -> tuple[nn.Module, dict[int, Tensor]]:
    """A copy of the model with fake tensors; and for those that are neither parameters nor buffers id -> the real one.

    Only for those: whoever keeps them would else keep the whole model.

    Raises:
        ParallelError: the model can't be copied.
    """
    memo: dict[int, Any] = {}
    plain: dict[int, Tensor] = {}
    for _, tensor in all_names(model):
        memo.setdefault(id(tensor), mode.from_tensor(tensor))
    for module in model.modules():
        # Plain attributes, such as a mask or a table of angles.
        for _, tensor in tensors_at({name: value for name, value in vars(module).items() if name not in _TABLES}):
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


def names_by_tensor(model: nn.Module) -> dict[int, str]:
    """A parameter's or buffer's id -> its first name."""
    return {id(tensor): name for name, tensor in reversed(all_names(model))}


def contents(model: nn.Module) -> dict[str, Any]:
    """Name -> which tensor a parameter or buffer is, and what a number, text or flag is that a module keeps."""
    found: dict[str, Any] = {name: id(tensor) for name, tensor in all_names(model)}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)) and key != "training":
                found[f"{name}.{key}".lstrip(".")] = value
    return found


@contextlib.contextmanager
def untouched(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Buffers, modes and random streams are put back when the block ends. training: the mode until then."""
    saved = [(tensor, tensor.detach().clone()) for tensor in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.is_cuda})
    if training is not None:
        model.train(training)
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for tensor, value in saved:
                    tensor.copy_(value)
