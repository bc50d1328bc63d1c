"""Tensors of torch and arrays of numpy as bytes and back, under the names of types that safetensors has.

https://github.com/huggingface/safetensors#format: little endian, rows one after the other. Neither library is imported
unless an array of its own is asked for.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from paceline.checkpoint.values import is_tensor
from paceline.errors import CheckpointError, UserError

#: In the format -> in torch, of which old ones lack some, and in numpy; None where it is not there.
TYPES: dict[str, tuple[str, str | None]] = {
    "F64": ("float64", "float64"),
    "F32": ("float32", "float32"),
    "F16": ("float16", "float16"),
    "BF16": ("bfloat16", None),
    "I64": ("int64", "int64"),
    "I32": ("int32", "int32"),
    "I16": ("int16", "int16"),
    "I8": ("int8", "int8"),
    "U64": ("uint64", "uint64"),
    "U32": ("uint32", "uint32"),
    "U16": ("uint16", "uint16"),
    "U8": ("uint8", "uint8"),
    "BOOL": ("bool", "bool"),
    "C64": ("complex64", "complex64"),
    "F8_E4M3": ("float8_e4m3fn", None),
    "F8_E5M2": ("float8_e5m2", None),
}
_OF_TORCH = {f"torch.{names[0]}": dtype for dtype, names in TYPES.items()}
_OF_NUMPY = {names[1]: dtype for dtype, names in TYPES.items() if names[1]}


class DenseArray:
    """One array, ready to be written. dtype: the format's name; shape; data: its bytes, shared with the array or a copy."""

    def __init__(self, name: str, array: Any, *, copy: bool) -> None:
        """copy: whether what is written must not change with the array.

        Raises:
            UserError: it has a type that the format has not, or no values here.
        """
        self.name, self.shape = name, [int(size) for size in array.shape]
        if is_tensor(array):
            self.dtype = _of_torch(name, array)
            # A copy on the CPU, of these rows alone: a view may be a small part of a large storage.
            tensor = array.detach()
            tensor = tensor.to("cpu", copy=True) if copy or tensor.device.type != "cpu" else tensor
            # The conjugate and the negative of a tensor may be a mark on it, and its bytes those of the original.
            self._held: Any = tensor.resolve_conj().resolve_neg().contiguous()
            size, address = self._held.numel() * self._held.element_size(), self._held.data_ptr()
        else:
            self.dtype = _named(name, str(array.dtype), _OF_NUMPY.get(array.dtype.name))
            little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=copy)
            self._held = little if little.flags.c_contiguous else little.copy("C")
            size, address = self._held.nbytes, self._held.ctypes.data
        # Not numpy's own view of a tensor: torch may be there without numpy.
        self.data = memoryview((ctypes.c_ubyte * size).from_address(address)) if size else memoryview(b"")
        self.size = size


def made(dtype: str, shape: list[int], data: bytearray, *, of: str) -> Any:
    """The array of these bytes, which becomes their owner. of: "torch" or "numpy".

    Raises:
        CheckpointError: the bytes are no such array, or the library of it is missing.
    """
    names = TYPES.get(dtype)
    name = None if names is None else names[of == "numpy"]
    try:
        if of == "numpy":
            import numpy

            if name is None:
                raise ValueError(f"numpy has no type {dtype}")
            return numpy.frombuffer(data, numpy.dtype(name).newbyteorder("<")).reshape(shape)
        import torch

        kind = getattr(torch, name or "", None)
        if kind is None:
            raise ValueError(f"this torch has no type {dtype}")
        # torch makes nothing of an empty buffer.
        return (torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)).reshape(shape)
    except ImportError as error:
        raise CheckpointError(f"it has arrays of {of}, which is not installed here") from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"it has an array that can't be made: {error}") from error


def _of_torch(name: str, tensor: Any) -> str:
    if sys.byteorder != "little":
        raise UserError("checkpoints are written in little endian, which this machine is not.")
    if type(tensor).__module__.startswith("torch.distributed"):
        raise UserError(
            f"{name!r} is a {type(tensor).__name__}: each rank has a part of it. Save what "
            "torch.distributed.checkpoint.state_dict gives with full_state_dict=True, or train with paceline.parallelize, "
            "whose par.save() writes the parts."
        )
    if tensor.layout is not sys.modules["torch"].strided or tensor.device.type == "meta" or tensor.is_quantized:
        what = "on the meta device" if tensor.device.type == "meta" else "sparse or quantized"
        raise UserError(
            f"{name!r} is a tensor {what}; a checkpoint keeps dense values. Save its parts or its dense form."
        )
    return _named(name, str(tensor.dtype), _OF_TORCH.get(str(tensor.dtype)))


def _named(name: str, own: str, found: str | None) -> str:
    if found is None:
        raise UserError(f"{name!r} has the type {own}, which a checkpoint can't keep. It has {', '.join(TYPES)}.")
    return found
