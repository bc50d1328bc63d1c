"""A copy of the user's model without values, to rebuild the model after it was cut into parts."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from paceline.parallel import tied_parameters
from paceline.parallel.errors import ParallelError
from paceline.parallel.full_tensor import whole
from paceline.parallel.tracing.fake_model import AttributeMirror


class Skeleton:
    """A copy of the user's model whose parameters are on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        # Store the name of the model's class now, because FSDP2 later replaces the class.
        self.name = type(model).__name__
        self.ties = tied_parameters.find(model)
        #: The reason why the model could not be copied, or "".
        self.reason = ""
        #: The size of all parameters and buffers in bytes.
        self.bytes = sum(tensor.nbytes for tensor in dict(tied_parameters.all_names(model)).values())
        self._model: nn.Module | None = None
        shells: dict[int, object] = {
            id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            for param in model.parameters()
        }
        try:
            self._model = copy.deepcopy(model, shells)
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
        self._mirror = AttributeMirror(model, self._model, by_version=True) if self._model is not None else None

    def follow(self) -> None:
        """Copy changed attributes of the model's modules to this meta copy."""
        if self._mirror is None:
            return
        try:
            self._mirror.follow(_copied)
        except Exception as error:
            self.reason = f"what was set on it since can't be copied ({type(error).__name__}: {error})"
            self._model = self._mirror = None

    def begin(self) -> None:
        """Take the modules' present attributes as the base: `follow` copies only later changes."""
        if self._mirror is not None:
            self._mirror.begin()

    def shell(self) -> nn.Module:
        """Return a current copy of the user's model without values, or raise ParallelError."""
        self.follow()
        if self._model is None:
            raise ParallelError(f"the model can't be copied: {self.reason}")
        return copy.deepcopy(self._model)

    def filled(self, values: dict[str, Tensor], device: torch.device) -> nn.Module:
        """Return a current copy of the user's model with these values, or raise ParallelError."""
        self.follow()
        if self._model is None:
            raise ParallelError(f"check() needs a copy of the model, and it can't be copied: {self.reason}")
        model = copy.deepcopy(self._model)
        for name, first in tied_parameters.first_names(model).items():
            value = values.get(name, values.get(first))
            part, attribute = tied_parameters.owner_of(model, name)
            # Don't use `part._parameters`, which is no dict in a scripted module but a view in C++.
            shell = dict(part.named_parameters(recurse=False, remove_duplicate=False)).get(attribute)
            # A tensor for which `values` has no value, such as a non-persistent buffer, keeps the value of the copied model.
            if value is not None and shell is None:
                part._buffers[attribute] = value.to(device)
            elif value is not None and shell is not None and shell.is_meta:
                part._parameters[attribute] = nn.Parameter(value.to(device), requires_grad=shell.requires_grad)
        tied_parameters.tie_again(model, self.ties)
        return model.to(device)


def _copied(tensor: Tensor) -> Tensor:
    return whole(tensor).detach().clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)
