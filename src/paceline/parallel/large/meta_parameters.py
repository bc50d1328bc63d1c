"""The part of a tensor that this rank has, as ranges of the whole. Loaded on use: it imports torch."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel import tied_parameters
from paceline.parallel.deterministic_rng import normal

#: For each dimension: from, to.
Region = tuple[tuple[int, int], ...]


def region_of(tensor: Any) -> Region:
    """This rank's part of a DTensor; all of any other tensor.

    The axis `tensor` of the mesh comes last and cuts first: FSDP2 cuts what it has left.
    """
    region = [(0, size) for size in tensor.shape]
    placements = getattr(tensor, "placements", ())
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not hasattr(placement, "dim"):
            continue
        # As torch.chunk cuts: equal parts, the last ones shorter or empty.
        start, end = region[placement.dim]
        ranks, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
        size = -(-(end - start) // ranks)
        region[placement.dim] = min(start + rank * size, end), min(start + (rank + 1) * size, end)
    return tuple(region)


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in region)


def give_memory(device: torch.device, *modules: nn.Module) -> None:
    """Give parameters and buffers that have none memory on the device, without values. Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in modules:
        is_changed = False
        for part in list(module.modules()):
            for name, param in list(part._parameters.items()):
                if param is None or not param.is_meta:
                    continue
                if id(param) not in made:
                    value = torch.empty_like(param, device=device)
                    made[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
                # By setattr: RNNs keep a second list of their parameters.
                setattr(part, name, made[id(param)])
                is_changed = True
        if is_changed:
            # Nothing moves; FSDP2 looks for parameters that are new to it only when a module is moved.
            module.to(device)


def return_memory() -> None:
    """Let glibc give back what is freed: what takes more than 1 MiB is asked of the kernel by itself.

    Its own limit grows with what is freed, up to 32 MiB, and what is smaller stays in a heap with holes. Where blocks are
    put together and let go of one after the other (FSDP2), a worker took three times the memory of its parts. Other
    allocators, and other systems, don't know the call.
    """
    mmap_threshold = -3
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**20)


def is_empty(module: nn.Module) -> bool:
    """True if a parameter or buffer has no memory."""
    return any(tensor.is_meta for tensors in (module.parameters(), module.buffers()) for tensor in tensors)


def move(model: nn.Module, device: torch.device) -> None:
    """As `model.to(device)`, for what has memory."""
    if not is_empty(model):
        model.to(device)
        return
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def stand_ins(
    model: nn.Module, device: torch.device, *, names: Collection[str] | None = None, dense: bool = False
) -> Iterator[None]:
    """Parameters without memory have numbers until the block ends, the same on all ranks.

    names: only those. dense: in memory of their own.
    """
    first = tied_parameters.first_names(model)
    made: dict[int, nn.Parameter] = {}
    swapped = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if not param.is_meta or (names is not None and name not in names):
            continue
        if id(param) not in made:
            value = stand_in(first[name], param, device)
            made[id(param)] = nn.Parameter(
                value.clone(memory_format=torch.contiguous_format) if dense else value, param.requires_grad
            )
        swapped.append((*tied_parameters.owner_of(model, name), param))
    try:
        for module, last, param in swapped:
            # By setattr: RNNs keep a second list of their parameters.
            setattr(module, last, made[id(param)])
        yield
    finally:
        for module, last, param in swapped:
            setattr(module, last, param)


def stand_in(name: str, param: Tensor, device: torch.device) -> Tensor:
    """Numbers of the size that weights of this shape have."""
    count = sum(param.shape) - param.dim() + 1
    if not param.is_floating_point() or not param.numel():
        return torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
    drawn = normal((count,), f"stand in {name}") * math.prod(param.shape[1:]) ** -0.5
    found: Tensor = drawn.to(device, param.dtype).as_strided(tuple(param.shape), (1,) * param.dim())
    return found
