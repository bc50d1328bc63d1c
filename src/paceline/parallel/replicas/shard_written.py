"""The parameters of a sharded model that its forward pass itself changes. Imports torch.

    root's forward   ChangedParts.begin
      unit's         ChangedParts.before, gather, Written.before
                     ...
                     Written.after, part
    its end          ChangedParts.after
    backward         gather ... part

FSDP2 gathers and parts; what is changed of a whole is put into this rank's part, and what is changed of a part is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.full_tensor import is_part
from paceline.parallel.large.parts import region_of, slices
from paceline.torch_private import sharded_parameters, whole_parameters


class ChangedParts:
    """Has a GPU finish what changes this rank's parts within a forward pass, before they are put together.

    FSDP2 does that on streams of its own, which wait for the caller's stream at the beginning of the root's forward pass alone: a
    momentum encoder that follows in there would be read while it is written.
    """

    def __init__(self, units: Sequence[nn.Module], wait: Callable[[], None]) -> None:
        """units: the root and those within it. wait: until the caller's stream has done all."""
        self._units = units
        self._wait = wait
        self._versions: dict[int, tuple[int, int]] = {}

    @torch.no_grad()
    def begin(self, *_: Any) -> None:
        """A hook that runs before the root's forward pass."""
        self._versions = {id(part): _versions(part) for unit in self._units for part in sharded_parameters(unit)}

    def before(self, unit: nn.Module, *_: Any) -> None:
        """A hook that runs before FSDP2 puts a unit's parameters together."""
        self._look((unit,))

    def after(self, *_: Any) -> None:
        """A hook that runs after the root's forward pass: the backward pass puts them together again."""
        self._look(self._units)

    @torch.no_grad()
    def _look(self, units: Iterable[nn.Module]) -> None:
        is_changed = False
        for unit in units:
            for part in sharded_parameters(unit):
                now = _versions(part)
                is_changed = is_changed or self._versions.get(id(part), now) != now
                self._versions[id(part)] = now
        if is_changed:
            self._wait()


def _versions(part: Any) -> tuple[int, int]:
    """How often it was changed in place, by its own name and by that of the tensor that it has here; called without gradients."""
    return part._version, part.to_local()._version


class Written:
    """Sees that a unit's forward pass changes its own parameters in place, and keeps that.

    FSDP2 gives it whole ones, and lets go of them: what is written there, such as a momentum encoder's values, would be lost.
    """

    def __init__(self, part: nn.Module, names: Mapping[int, str]) -> None:
        """names: id of each parameter in parts -> its name, filled once there are parts."""
        self._part, self._names = part, names
        self._versions: dict[int, int] = {}
        #: Name -> size of what was written, until the executor takes it; the same on all ranks if they wrote the same.
        self.sizes: dict[str, float] = {}

    def before(self, *_: Any) -> None:
        """A hook that runs once the parameters are whole."""
        self._versions = {id(whole): whole._version for _, whole in whole_parameters(self._part, inner=False)}

    def after(self, *_: Any) -> None:
        """A hook that runs while they are."""
        for sharded, whole in whole_parameters(self._part, inner=False):
            if whole._version != self._versions.get(id(whole), whole._version):
                _write_back(sharded, whole)
                self.sizes[self._names.get(id(sharded), "a parameter")] = size_of(whole)
                self._versions[id(whole)] = whole._version


def size_of(param: Any) -> float:
    """The sum of a parameter's absolute values."""
    part = param.detach()
    return float((part.to_local() if is_part(part) else part).abs().sum(dtype=torch.float64))


def _write_back(sharded: Any, whole: nn.Parameter) -> None:
    """Put this rank's part of the whole where FSDP2 takes it from."""
    part = whole.detach()
    if is_part(part):
        raise ParallelError(
            "the model's forward pass changes a parameter that is cut by FullyShard() and by TensorParallel() in place. Leave "
            "its layer whole (TensorParallel(plan={...: 'replicate'})), or use DataParallel()."
        )
    with torch.no_grad():
        sharded.to_local().copy_(part[slices(region_of(sharded))])
