"""Averages of a model's weights during training, and frozen submodules that follow a trained one.

Average    a copy of the whole model with averaged weights; each worker holds the part that it trains
Twin       a frozen submodule (a target network, a momentum encoder), whose weights follow another submodule
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.checkpoint.store import full_state_dict, hold
from paceline.parallel.errors import ParallelError, check_count
from paceline.parallel.exchange import gather
from paceline.parallel.full_tensor import is_part, whole
from paceline.parallel.large.meta_parameters import region_of, slices
from paceline.parallel.reduce import local

if TYPE_CHECKING:
    from paceline.parallel.executor import ParallelHandle

#: The decay of the average: a number, a function of the number of updates so far, or None for the mean over all updates.
Decay = float | Callable[[int], float] | None


class _Follower:
    """A base class of copies that follow trained weights: `Average` and `Twin`.

    Attributes:
        count: How often `Parallel.step` has updated the copy.
        tensors: Tensor's name in the model (a tied tensor's first name) -> this rank's part of the average, for checkpoints.
    """

    def __init__(self, par: ParallelHandle, decay: Decay, every: int) -> None:
        _check(decay, every)
        self._par, self._decay, self._every = par, decay, every
        self.count = self._steps = 0
        self.is_applied = False
        self.tensors: dict[str, Tensor] = {}

    @property
    def state(self) -> list[int]:
        """Return [number of updates of the averaged weights, number of optimizer steps]."""
        return [self.count, self._steps]

    @state.setter
    def state(self, value: list[int]) -> None:
        self.count, self._steps = value

    @torch.no_grad()
    def stepped(self) -> None:
        """Count an optimizer step. After each `every` steps, update the averaged weights."""
        self._steps += 1
        if self._steps % self._every:
            return
        self._update(_kept(self._decay, self.count))
        self.count += 1

    def _update(self, keep: float) -> None:
        raise NotImplementedError


class Average(_Follower):
    """An average of all parameters, kept in float32 or a wider dtype."""

    def __init__(self, par: ParallelHandle, decay: Decay, every: int) -> None:
        super().__init__(par, decay, every)
        held = hold(par)
        self._learned = {name for name in held.parameters if _is_averaged(held.parameters[name])}
        self.tensors = {name: _wide(tensor.detach()) for name, tensor in held.model_tensors().items()}

    def _update(self, keep: float) -> None:
        # Give a buffer's old value the weight 0, so that the new value replaces it, as in torch's AveragedModel.
        for name, tensor in hold(self._par).model_tensors().items():
            _follow(local(self.tensors[name]), local(tensor.detach()), keep if name in self._learned else 0.0)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, let the model compute with the averaged weights."""
        if self.is_applied:
            raise ParallelError("average.applied() is open already. Leave its block before opening it again.")
        held = {name: tensor.detach() for name, tensor in hold(self._par).model_tensors().items()}
        before = {name: local(tensor).clone() for name, tensor in held.items()}
        self.is_applied = True
        try:
            for name, tensor in held.items():
                local(tensor).copy_(local(self.tensors[name]))
            yield
        finally:
            # Look up the tensors again: FSDP2 may have gathered parameters meanwhile.
            for name, tensor in hold(self._par).model_tensors().items():
                local(tensor.detach()).copy_(before[name])
            self.is_applied = False

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole averaged model on the CPU, on every rank.

        The names are the model's, so `load_state_dict` of the plain model accepts the result.
        """
        with self.applied():
            return full_state_dict(self._par)


class Twin(_Follower):
    """A frozen submodule that follows another submodule of the same shape.

    `tensors` is empty, because checkpoints store the submodule as a part of the model.
    """

    def __init__(self, par: ParallelHandle, decay: Decay, every: int, of: str, into: str) -> None:
        super().__init__(par, decay, every)
        self._of, self._into = of, into
        held = hold(par)
        tensors = held.model_tensors()
        own = {name: (tensors[first].shape, tensors[first].dtype) for name, first in held.first_names().items()}
        self._pipe = par.world.group("pipe")
        #: The names of the tensors in each stage of the pipeline.
        stages = [own] if self._pipe is None else gather(own, self._pipe)
        self._stages = [set(of_stage) for of_stage in stages]
        self._about = {name: about for of_stage in reversed(stages) for name, about in of_stage.items()}
        rests = {end: _ends(self._about, end) for end in (of, into)}
        if missing := [end for end in (of, into) if not rests[end]]:
            raise ParallelError(
                f"average(of={of!r}, into={into!r}): the model has no part {missing[0]!r} with tensors."
            )
        if different := sorted(rests[of] ^ rests[into]):
            raise ParallelError(f"average(of={of!r}, into={into!r}): {different[0]!r} is in one of the two alone.")
        self._rests = sorted(rests[of])
        for rest in self._rests:
            shapes = [list(self._about[f"{end}.{rest}"][0]) for end in (of, into)]
            if shapes[0] != shapes[1]:
                raise ParallelError(
                    f"average(of={of!r}, into={into!r}): {rest!r} has the shape {shapes[0]} in the one and "
                    f"{shapes[1]} in the other."
                )
        learns = [
            name for name, param in held.parameters.items() if name.startswith(f"{into}.") and param.requires_grad
        ]
        if self._pipe is not None:
            learns = [name for of_stage in gather(learns, self._pipe) for name in of_stage]
        if learns:
            raise ParallelError(
                f"average(into={into!r}): {learns[0]} is trained itself. Freeze it before parallelize: "
                f"model.{into}.requires_grad_(False)."
            )

    def _update(self, keep: float) -> None:
        held = hold(self._par)
        first, tensors = held.first_names(), held.model_tensors()
        # Update a tied tensor only once, although it has several names.
        followed: set[str] = set()
        for rest in self._rests:
            source, twin = (f"{end}.{rest}" for end in (self._of, self._into))
            own = tensors[first[source]].detach() if source in first else None
            if any(twin in names and source not in names for names in self._stages):
                own = self._moved(own, source)
            if own is not None and twin in first and first[twin] not in followed:
                followed.add(first[twin])
                there = tensors[first[twin]].detach()
                is_averaged = _is_averaged(there) and first[twin] in held.parameters
                _follow(local(there), _cut(own, there), keep if is_averaged else 0.0)

    def _moved(self, own: Tensor | None, source: str) -> Tensor:
        """Broadcast a whole tensor from the pipeline stage that has it, and return it.

        own: This rank's part of the tensor, None on other stages. source: The tensor's name.
        """
        root = next(stage for stage, names in enumerate(self._stages) if source in names)
        shape, dtype = self._about[source]
        if own is not None and self._par.world.coordinate("pipe") == root:
            value = whole(own).contiguous()
        else:
            value = torch.empty(shape, dtype=dtype, device=self._par.device)
        dist.broadcast(value, group=self._pipe, group_src=root)
        return value


def _check(decay: Decay, every: int) -> None:
    if not (decay is None or callable(decay) or (isinstance(decay, (int, float)) and 0 <= decay <= 1)):
        raise ParallelError(
            f"average(decay={decay!r}): a number from 0 (a copy) to 1 (no change), a function of the number of updates, or None "
            "for the mean of all."
        )
    check_count(f"average(every={every!r})", every, "a whole number of steps, of at least 1")


def _kept(decay: Decay, count: int) -> float:
    if decay is None:
        return count / (count + 1)
    return float(decay(count)) if callable(decay) else float(decay)


def _follow(average: Tensor, value: Tensor, keep: float) -> None:
    if keep:
        average.mul_(keep).add_(value, alpha=1 - keep)
    else:
        average.copy_(value)


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    """Copy a tensor as float32 or wider: bf16 rounds decays near 1 to 1."""
    is_narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return tensor.clone().to(torch.float32) if is_narrow else tensor.clone()


def _ends(names: Iterable[str], module: str) -> set[str]:
    return {name.removeprefix(f"{module}.") for name in names if name.startswith(f"{module}.")}


def _cut(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor, split as `like` is split."""
    if getattr(value, "placements", None) == getattr(like, "placements", None):
        return local(value)
    return whole(value)[slices(region_of(like))] if is_part(like) else whole(value)
