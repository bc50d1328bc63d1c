"""Tensors as MPI buffers: an address, a count and a datatype.

MPI supports neither torch's strides nor its 16-bit floats. This module copies such tensors, and copies the results
back. Importing the module loads torch and mpi4py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from paceline.collectives.errors import CollectivesError

#: A reduce operation as torch passes it: a member of the enumeration RedOpType, or a ReduceOp that wraps a member.
Operation = ReduceOp | ReduceOp.RedOpType
MpiBuffer = tuple[MPI.buffer, MPI.Datatype]
#: A buffer with one part per rank, as mpi4py expects it: (buffer, (sizes of the parts, offsets of the parts), datatype).
MpiPieces = tuple[MPI.buffer, tuple[list[int], list[int]], MPI.Datatype]

#: torch's dtype that MPI can reduce -> MPI's datatype. `wide` converts half precision to float32 before the reduction.
_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.bool: MPI.C_BOOL,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}

_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
# For C's bool, MPI has only logical operations, so map sum, product, minimum and maximum to them.
_LOGICAL = {
    ReduceOp.SUM: MPI.LOR,
    ReduceOp.PRODUCT: MPI.LAND,
    ReduceOp.MIN: MPI.LAND,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.BAND: MPI.LAND,
    ReduceOp.BOR: MPI.LOR,
    ReduceOp.BXOR: MPI.LXOR,
}


def check(tensor: torch.Tensor) -> None:
    """Raise CollectivesError for a sparse tensor or one outside of CPU memory."""
    if tensor.device.type != "cpu":
        raise CollectivesError(
            f"the tensor is on {tensor.device}, but the backend 'mpi' moves tensors in the CPU's memory. "
            "Move it with .cpu(), or use backend 'nccl' for tensors on a GPU."
        )
    if tensor.layout != torch.strided:
        raise CollectivesError(
            f"the tensor's layout is {tensor.layout}, which the backend 'mpi' takes in all_reduce alone (as coordinates: "
            "torch.sparse_coo). Make it dense with .to_dense()."
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values are contiguous in memory."""
    # torch conjugates and negates lazily, by setting a flag. The memory then holds other numbers than the tensor shows.
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is contiguous, else a contiguous copy."""
    if is_plain(tensor):
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def room(tensor: torch.Tensor) -> torch.Tensor:
    """Return contiguous memory for a result: the tensor itself, or a new one."""
    if is_plain(tensor):
        return tensor.detach()
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def put(result: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a result into the caller's tensor, unless it is there already."""
    if result.data_ptr() != into.data_ptr() or result.dtype != into.dtype or not is_plain(into):
        into.detach().copy_(result.reshape(into.shape))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the tensors' values in a new flat tensor."""
    return torch.cat([plain(tensor).reshape(-1) for tensor in tensors])


def distribute(flat: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    """Copy the parts of a flat tensor into the tensors, in order."""
    for piece, tensor in zip(torch.split(flat, [tensor.numel() for tensor in into]), into, strict=True):
        tensor.detach().copy_(piece.view(tensor.shape))


def raw(tensor: torch.Tensor) -> MPI.buffer:
    """Return the memory of a contiguous tensor as an MPI buffer of bytes."""
    # Create the buffer from the memory address, because NumPy does not support bfloat16.
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def elements(tensor: torch.Tensor) -> MpiBuffer:
    """Return an MPI buffer to send or receive a contiguous tensor."""
    # Don't pass a count: some functions of mpi4py expect the count of one rank, and others the count of all ranks together.
    return raw(tensor), _carrier(tensor.element_size())


def pieces(tensor: torch.Tensor, sizes: Sequence[int]) -> MpiPieces:
    """Return an MPI buffer with `sizes[r]` elements of the tensor for rank r."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return raw(tensor), (list(sizes), starts), _carrier(tensor.element_size())


def wide(tensor: torch.Tensor, operation: MPI.Op) -> torch.Tensor:
    """Convert the tensor to a dtype in which MPI can reduce it."""
    # Convert floats of 16 or 8 bits, which MPI does not have, to float32. For sums, convert int8 and int16 to int32. Otherwise
    # return the tensor itself, made contiguous.
    if tensor.is_floating_point() and tensor.element_size() < 4:
        return plain(tensor).float()
    # With AVX, Open MPI's sums of short integers stop at the largest number (component op/avx). Other builds wrap around, as
    # torch does. Sums of int32 have the right low bits in both cases.
    if operation == MPI.SUM and tensor.element_size() < 4:
        return plain(tensor).to(torch.int32)
    return plain(tensor)


def numbers(tensor: torch.Tensor) -> MpiBuffer:
    """Return an MPI buffer to reduce a tensor that `wide` has returned."""
    return raw(tensor), datatype(tensor.dtype)


def datatype(dtype: torch.dtype) -> MPI.Datatype:
    """Return MPI's datatype for this dtype."""
    try:
        return _DATATYPES[dtype]
    except KeyError:
        known = ", ".join(str(known) for known in _DATATYPES)
        raise CollectivesError(
            f"can't reduce tensors of {dtype} over MPI. It reduces {known} and, in float32, shorter floats."
        ) from None


def reduction(op: Operation, dtype: torch.dtype) -> MPI.Op:
    """Return MPI's operation for a ReduceOp and dtype.

    For AVG it is SUM, and the caller divides the result (see `average`). For bool, SUM and MAX give "or", and PRODUCT
    and MIN give "and".
    """
    return _reduction(kind_of(op), dtype)


# Cache the result, because each training step needs the same few pairs of operation and dtype hundreds of times.
@functools.lru_cache(maxsize=256)
def _reduction(kind: ReduceOp.RedOpType, dtype: torch.dtype) -> MPI.Op:
    why = None
    if kind not in _OPS:
        why = "the backend 'mpi' doesn't have it: multiply first, then reduce with ReduceOp.SUM"
    elif kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        why = "bits of floating-point numbers mean nothing; use an integer dtype"
    elif dtype.is_complex and kind in (ReduceOp.MIN, ReduceOp.MAX):
        why = "complex numbers have no order; use SUM, AVG or PRODUCT"
    elif dtype == torch.bool and kind == ReduceOp.AVG:
        why = "a mean of booleans is not a boolean; convert to a number first"
    if why:
        raise CollectivesError(f"ReduceOp.{kind.name} of a tensor of {dtype}: {why}.")
    return _LOGICAL[kind] if dtype == torch.bool else _OPS[kind]


def kind_of(op: Operation) -> ReduceOp.RedOpType:
    """Unwrap a reduce operation, which torch may pass in a wrapper."""
    if isinstance(op, ReduceOp.RedOpType):
        return op
    kind: ReduceOp.RedOpType = attrgetter("op")(op)
    return kind


def average(tensor: torch.Tensor, op: Operation, size: int) -> None:
    """Divide the tensor by the number of ranks if the operation is AVG."""
    # Round averages of integers towards 0.
    if kind_of(op) != ReduceOp.AVG or size == 1:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(size)
    else:
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


def _carrier(size_bytes: int) -> MPI.Datatype:
    # Count elements of the tensor's own size instead of bytes, so that the count stays small. MPI has no integer of 16
    # bytes, so use a double-precision complex number. MPI only moves the data.
    carriers = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}
    return carriers[size_bytes]
