"""Conversions between torch's tensors and the engine's arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.collectives.numbers import Array
from paceline.compat.horovod.common.reduction import Compressor, How


class HostTensor(NamedTuple):
    """Contiguous host memory with a tensor's values.

    `tensor` is the original tensor if possible, else a copy. `array` shares the memory of `tensor`. NumPy lacks
    bfloat16, so for this type `array` holds the bits as uint16.
    """

    tensor: torch.Tensor
    array: Array

    @property
    def dtype(self) -> str | None:
        """The type "bfloat16", which `array` stores as uint16, or None for other types."""
        return "bfloat16" if self.tensor.dtype == torch.bfloat16 else None


def differentiable(function: Any, *args: object) -> Any:
    """Apply an autograd function. This wrapper has type hints, which torch's `apply` lacks."""
    return function.apply(*args)


def compressed(
    function: type[torch.autograd.Function],
    tensors: Sequence[torch.Tensor],
    compression: type[Compressor],
    name: str | None,
    how: How,
    *,
    grouped: bool,
) -> list[torch.Tensor]:
    """Apply an autograd function to compressed tensors, and return decompressed results."""
    sent = [compression.compress(tensor) for tensor in tensors]
    results = differentiable(function, name, how, grouped, *[tensor for tensor, _ in sent])
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, sent, strict=True)]


def stays_on_device(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether NCCL reduces these tensors on their GPU."""
    for tensor in tensors:
        if not (isinstance(tensor, torch.Tensor) and tensor.is_cuda):
            return False
    from paceline.collectives import device

    return device.is_wanted(os.environ) and len({tensor.device for tensor in tensors}) == 1


def host(tensor: torch.Tensor) -> HostTensor:
    """Return the tensor's values in contiguous host memory."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"a collective takes a torch.Tensor, not {type(tensor).__name__}.")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"a tensor of layout {tensor.layout} can't be sent without a conversion; use hvd.sparse_allreduce_async, "
            "or to_dense()."
        )
    # Detach the tensor: torch makes no NumPy array from a tensor that requires a gradient.
    plain = tensor.detach() if tensor.requires_grad else tensor
    if not (plain.is_cpu and plain.is_contiguous()) or plain.is_conj() or plain.is_neg():
        # Resolve a lazy conjugation or negation, because NumPy can't read it. `contiguous` alone would not resolve it.
        plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    try:
        array = (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()
    except TypeError as error:
        raise ValueError(f"tensors of type {tensor.dtype} can't be sent: {error}. Convert it first.") from error
    return HostTensor(plain, array)


def room(source: HostTensor) -> HostTensor:
    """Return new host memory with the type and shape of `source`."""
    return host(torch.empty(source.tensor.shape, dtype=source.tensor.dtype, device="cpu"))


def filled(tensor: torch.Tensor, in_place: bool, out: HostTensor) -> torch.Tensor:
    """Return the result of a collective as a tensor.

    If `in_place`, the result is `tensor`. `out` is the host memory to which the collective wrote its result.
    """
    return write_back(tensor, out.tensor) if in_place else out.tensor.to(tensor.device)


@dataclass(slots=True)
class Filled:
    """A callable that converts a collective's result to a tensor by `filled`."""

    tensor: torch.Tensor
    in_place: bool
    out: HostTensor

    def __call__(self, _: object) -> torch.Tensor:
        return filled(self.tensor, self.in_place, self.out)


def from_array(array: Array, like: torch.Tensor) -> torch.Tensor:
    """Convert an array to a tensor with the type and device of `like`."""
    # torch warns about arrays that are read-only, so copy them.
    made = torch.from_numpy(array if array.flags.writeable else array.copy())
    if like.dtype == torch.bfloat16:
        made = made.view(torch.bfloat16)
    return made.to(like.device)


def results_like(tensors: Sequence[torch.Tensor], grouped: bool) -> Callable[[list[Array]], object]:
    """Return a function that converts an operation's arrays to tensors like these."""

    def finish(arrays: list[Array]) -> object:
        made = [from_array(array, tensor) for array, tensor in zip(arrays, tensors, strict=True)]
        return made if grouped else made[0]

    return finish


def write_back(target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copy `result` into `target`, unless they share memory. Return `target`."""
    if result is target:
        return target
    if result.device != target.device or result.data_ptr() != target.data_ptr() or result.stride() != target.stride():
        with torch.no_grad():
            target.detach().copy_(result)
    return target
