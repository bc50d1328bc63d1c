"""A model's structure without its values, to build the plain model again after it was cut. Imports torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel import tied_parameters
from paceline.parallel.errors import ParallelError
from paceline.parallel.full_tensor import whole
from paceline.parallel.tracing.fake_model import AttributeMirror


class Skeleton:
    """The user's model as it was before it was cut, without its values: made before anything is changed."""

    def __init__(self, model: nn.Module) -> None:
        # The name of the user's class, taken now: FSDP2 gives a model another class.
        self.name = type(model).__name__
        self.ties = tied_parameters.find(model)
        #: Why there is no copy; "" if there is.
        self.reason = ""
        #: Of all parameters and buffers.
        self.bytes = sum(tensor.nbytes for tensor in dict(tied_parameters.all_names(model)).values())
        self._model: nn.Module | None = None
        shells: dict[int, Any] = {
            id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            for param in model.parameters()
        }
        try:
            self._model = copy.deepcopy(model, shells)
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
        self._mirror = AttributeMirror(model, self._model, by_version=True) if self._model is not None else None

    def follow(self) -> None:
        """Take over what the user has set on the modules since: numbers, lists, plain tensors."""
        if self._mirror is None:
            return
        try:
            self._mirror.follow(_copied)
        except Exception as error:
            self.reason = f"what was set on it since can't be copied ({type(error).__name__}: {error})"
            self._model = self._mirror = None

    def begin(self) -> None:
        """Take the modules' attributes as the layout has left them; only later changes are the user's."""
        if self._mirror is not None:
            self._mirror.begin()

    def shell(self) -> nn.Module:
        """A plain model without values, with the attributes that the user's has now.

        Raises:
            ParallelError: the model could not be copied.
        """
        self.follow()
        if self._model is None:
            raise ParallelError(f"the model can't be copied: {self.reason}")
        return copy.deepcopy(self._model)

    def filled(self, values: dict[str, Tensor], device: torch.device) -> nn.Module:
        """A plain model with these values, and with the attributes that the user's has now.

        Raises:
            ParallelError: the model could not be copied.
        """
        self.follow()
        if self._model is None:
            raise ParallelError(f"check() needs a copy of the model, and it can't be copied: {self.reason}")
        model = copy.deepcopy(self._model)
        first = tied_parameters.first_names(model)
        for name in list(dict(tied_parameters.all_names(model))):
            if name not in values and first[name] not in values:
                # A buffer that isn't in state dicts stays as it was when the model was copied.
                continue
            value = values.get(name, values.get(first[name]))
            assert value is not None
            part, attribute = tied_parameters.owner_of(model, name)
            if attribute in part._parameters:
                shell = part._parameters[attribute]
                assert shell is not None
                if shell.is_meta:
                    part._parameters[attribute] = nn.Parameter(value.to(device), requires_grad=shell.requires_grad)
            else:
                part._buffers[attribute] = value.to(device)
        tied_parameters.tie_again(model, self.ties)
        return model.to(device)


def _copied(tensor: Tensor) -> Tensor:
    copied: Tensor = whole(tensor).detach().clone()
    return copied.requires_grad_(tensor.requires_grad and tensor.is_leaf)
