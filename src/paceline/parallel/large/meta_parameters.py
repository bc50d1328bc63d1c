"""Parameters on the meta device (without memory): allocate them, replace them for a trial, find this rank's part."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from paceline.parallel import tied_parameters
from paceline.parallel.deterministic_rng import normal
from paceline.parallel.full_tensor import is_part

#: A part of a tensor: the pair (start index, end index) for each dimension.
Region = tuple[tuple[int, int], ...]


def region_of(tensor: Tensor) -> Region:
    """Return this rank's part of a tensor as (start, end) in each dimension.

    A tensor can be split twice: first by tensor parallelism (the mesh's last axis), and then each part by FSDP2.
    """
    region = [(0, size) for size in tensor.shape]
    if not is_part(tensor):
        return tuple(region)
    for axis, placement in reversed([*enumerate(tensor.placements)]):
        # Compute the parts as torch.chunk does: of equal size, except that the last parts may be shorter or empty.
        for dim in [placement.dim] if hasattr(placement, "dim") else []:
            start, end = region[dim]
            ranks, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
            size = -(-(end - start) // ranks)
            region[dim] = min(start + rank * size, end), min(start + (rank + 1) * size, end)
    return tuple(region)


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in region)


def give_memory(device: torch.device, *modules: nn.Module) -> None:
    """Allocate uninitialised memory for parameters on the meta device, tied ones once."""
    made: dict[int, nn.Parameter] = {}
    for module in modules:
        empty = [
            (part, name, param)
            for part in module.modules()
            for name, param in part._parameters.items()
            if param is not None and param.is_meta
        ]
        for part, name, param in empty:
            if id(param) not in made:
                value = torch.empty_like(param, device=device)
                made[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
            # Use setattr, because it also updates the second list of parameters that RNNs keep.
            setattr(part, name, made[id(param)])
        if empty:
            # Call `to` although the parameters are on the device already: only this call makes FSDP2 notice new parameters.
            module.to(device)


def return_memory() -> None:
    """Make glibc return freed memory to the kernel earlier.

    FSDP2 gathers and frees blocks in turn. Without this call a worker would take three times the memory of its parts.
    """
    mmap_threshold = -3
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**20)


def is_empty(module: nn.Module) -> bool:
    """Return whether the module has tensors on the meta device."""
    return any(tensor.is_meta for tensors in (module.parameters(), module.buffers()) for tensor in tensors)


def move(model: nn.Module, device: torch.device) -> None:
    """Move the model's tensors to `device`, except those on the meta device."""
    if not is_empty(model):
        model.to(device)
        return
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def stand_ins(
    model: nn.Module, device: torch.device, *, names: Collection[str] | None = None, dense: bool = False
) -> Iterator[None]:
    """Within the block, give parameters on the meta device random values.

    An n x m weight is a view of n + m - 1 random numbers, in which each row is shifted by one. Like a trained weight it
    has full rank, so wrong results are not hidden. Kernels copy such a view first, which takes time. So measure with `dense`.

    Args:
        model: Its parameters are replaced within the block.
        device: The device of the values.
        names: Replace only the parameters with these names.
        dense: Give each parameter memory of its own instead of a view.
    """
    first = tied_parameters.first_names(model)
    made: dict[int, nn.Parameter] = {}
    params = model.named_parameters(remove_duplicate=False)
    empty = {name: param for name, param in params if param.is_meta and (names is None or name in names)}
    for name, param in empty.items():
        if id(param) not in made:
            value = stand_in(first[name], param, device)
            value = value.clone(memory_format=torch.contiguous_format) if dense else value
            made[id(param)] = nn.Parameter(value, param.requires_grad)
    swapped = [(*tied_parameters.owner_of(model, name), param) for name, param in empty.items()]
    try:
        for module, last, param in swapped:
            # Use setattr, because it also updates the second list of parameters that RNNs keep.
            setattr(module, last, made[id(param)])
        yield
    finally:
        for module, last, param in swapped:
            setattr(module, last, param)


def stand_in(name: str, param: Tensor, device: torch.device) -> Tensor:
    """Return random numbers like initial weights for `param`. `name` selects them."""
    count = sum(param.shape) - param.dim() + 1
    if not param.is_floating_point() or not param.numel():
        return torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
    drawn = normal((count,), f"stand in {name}") * math.prod(param.shape[1:]) ** -0.5
    weights: Tensor = drawn.to(device, param.dtype).as_strided(tuple(param.shape), (1,) * param.dim())
    return weights
