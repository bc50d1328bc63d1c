"""Convert states to JSON and arrays, and back. Loading runs no code, because there is no pickle.

    {"w": tensor, "step": 3}   ->   {"$": "dict", "of": [["w", {"$": "tensor", "at": "w"}], ["step", 3]]}

A value of a type that JSON lacks becomes a JSON object whose "$" names the type. Every dict is encoded in this way too,
so that no dict looks like another type.

Arrays are stored as safetensors (https://github.com/huggingface/safetensors#format): little endian, row by row. Neither torch
nor numpy is imported unless an array of that library is requested.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from paceline.errors import CheckpointError, UserError

if TYPE_CHECKING:
    import torch

Library = Literal["torch", "numpy"]

_SEQUENCES: dict[str, Callable[[Any], object]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_KINDS = {kind: name for name, kind in (*_SEQUENCES.items(), *_MAPPINGS.items())}
#: Class -> the name that marks values of this class in JSON, and a function that converts such a value to JSON.
_SINGLE: dict[type, tuple[str, Callable[[Any], object]]] = {
    float: ("float", repr),
    complex: ("complex", lambda value: [repr(value.real), repr(value.imag)]),
    bytes: ("bytes", bytes.hex),
    bytearray: ("bytes", bytearray.hex),
}
#: Name of a torch class -> a function that converts a value to JSON. Names are used, because torch may not be loaded.
_SINGLE_OF_TORCH: dict[str, Callable[[Any], object]] = {"Size": list, "dtype": str, "device": str}
_DEEPEST = 200

#: dtype in safetensors -> dtype in torch (missing in some old releases), and in numpy (None if numpy has no such dtype).
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


def encode_state(state: object) -> tuple[Any, dict[str, object]]:
    """Split a state into JSON and a dict of its arrays by name.

    An object with `state_dict` and `load_state_dict` (model, optimizer, scheduler, sampler) is replaced by the result of
    `state_dict`.

    Raises:
        UserError: A value's type is not supported. The message names its place.
    """
    arrays: dict[str, object] = {}
    return _encoded(state, (), arrays), arrays


def decode_state(encoded: object, array: Callable[[str, Library], object]) -> Any:
    """Rebuild a state from its JSON. `array(name, library)` must return each array.

    Raises:
        CheckpointError: The JSON does not describe a state.
    """
    try:
        return _decoded(encoded, array)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"it says what no save() writes ({type(error).__name__}: {error})") from error


def _encoded(value: Any, path: tuple[str, ...], arrays: dict[str, object]) -> object:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if len(path) > _DEEPEST:
        raise _refused(path, "is nested too deeply, or contains itself")
    if (encoded := _encoded_array(value, path, arrays)) is not None:
        return encoded
    if kind is list:
        return [_encoded(item, (*path, str(number)), arrays) for number, item in enumerate(value)]
    if kind in _MAPPINGS.values():
        return _encoded_mapping(value, _KINDS[kind], path, arrays)
    if kind in _KINDS:
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {"$": _KINDS[kind], "of": [_encoded(item, (*path, str(n)), arrays) for n, item in enumerate(items)]}
    if kind in _SINGLE:
        name, to_json = _SINGLE[kind]
        return {"$": name, "of": to_json(value)}
    if kind.__module__ == "torch" and kind.__name__ in _SINGLE_OF_TORCH:
        return {"$": kind.__name__.lower(), "of": _SINGLE_OF_TORCH[kind.__name__](value)}
    # Prefer state_dict(), because a class may be a mapping and have a state_dict() as well.
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _encoded(value.state_dict(), path, arrays)
    if isinstance(value, dict) and kind.__module__.startswith(("torch.", "collections")):
        return _encoded_mapping(value, "dict", path, arrays)
    raise _refused(path, f"is a {kind.__module__}.{kind.__qualname__}")


def _encoded_array(value: object, path: tuple[str, ...], arrays: dict[str, object]) -> object:
    if is_tensor(value):
        return {"$": "tensor", "at": _kept(value, path, arrays)}
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
    return {"$": kind, "at": _kept(numpy.asarray(value), path, arrays)}


def _encoded_mapping(
    value: Mapping[object, object], kind: str, path: tuple[str, ...], arrays: dict[str, object]
) -> object:
    pairs = [[_key(key, path), _encoded(item, (*path, str(key)), arrays)] for key, item in value.items()]
    return {"$": kind, "of": pairs}


def _key(key: object, path: tuple[str, ...]) -> object:
    if key is None or type(key) in (bool, int, str, float, tuple):
        return _encoded(key, path, {})
    rule = " as a key. Keys are texts, numbers, None and tuples of these."
    raise _refused(path, f"has the key {key!r}, a {type(key).__qualname__}", rule)


def _kept(array: object, path: tuple[str, ...], arrays: dict[str, object]) -> str:
    name = stem = ".".join(path) or "value"
    number = 2
    # Make the array's name unique: `{"a.b": x, "a": {"b": y}}` gives x and y the name "a.b". The format reserves "__metadata__".
    while name in arrays or name == "__metadata__":
        name, number = f"{stem}#{number}", number + 1
    arrays[name] = array
    return name


def _refused(path: tuple[str, ...], what: str, rule: str = "") -> UserError:
    rule = rule or (
        ". Numbers, texts, bytes, lists, tuples, sets, dicts, tensors of torch, arrays of numpy, and objects with "
        "state_dict() and load_state_dict() can: give its values instead."
    )
    return UserError(f"state{''.join(f'[{part!r}]' for part in path)} {what}, which can't be stored{rule}")


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _decoded(encoded: object, array: Callable[[str, Library], object]) -> object:
    if isinstance(encoded, list):
        return [_decoded(item, array) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    kind = encoded["$"]
    if kind in _READ_ARRAYS:
        return _READ_ARRAYS[kind](array, encoded["at"])
    of = encoded["of"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decoded(item, array) for item in of)
    if kind in _MAPPINGS:
        mapping = _MAPPINGS[kind]()
        for key, item in of:
            mapping[_decoded(key, array)] = _decoded(item, array)
        return mapping
    if kind not in _READ_SINGLE:
        raise ValueError(f"a value of kind {kind!r}")
    return _READ_SINGLE[kind](of)


def _size(of: list[int]) -> object:
    import torch

    return torch.Size(of)


def _device(of: str) -> object:
    import torch

    return torch.device(of)


def _dtype(of: str) -> object:
    import torch

    dtype = getattr(torch, str(of).removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{of} is not a type of torch")
    return dtype


_READ_ARRAYS: dict[str, Callable[[Callable[[str, Library], Any], str], object]] = {
    "tensor": lambda array, name: array(name, "torch"),
    "array": lambda array, name: array(name, "numpy"),
    "scalar": lambda array, name: array(name, "numpy")[()],
}
_READ_SINGLE: dict[str, Callable[[Any], object]] = {
    "float": float,
    "complex": lambda of: complex(*map(float, of)),
    "bytes": bytes.fromhex,
    "size": _size,
    "device": _device,
    "dtype": _dtype,
}


def is_storable(tensor: torch.Tensor) -> bool:
    """Return whether safetensors files can hold the tensor's dtype."""
    return str(tensor.dtype) in _OF_TORCH


class DenseArray:
    """An array as contiguous bytes, without a copy if possible.

    Attributes:
        dtype: The safetensors name of the dtype.
        size: The number of bytes.
        is_on_gpu: Whether the bytes are in GPU memory. If so, the attribute `tensor` holds them.
    """

    def __init__(self, name: str, array: Any) -> None:
        """Wrap a tensor or array.

        Raises:
            UserError: The dtype is not supported, or the tensor is sparse, on the meta device, or one rank's part.
        """
        self.name, self.shape = name, [int(size) for size in array.shape]
        self.is_on_gpu = False
        if is_tensor(array):
            self.dtype = _of_torch(name, array)
            # A tensor may only be flagged as conjugated or negated, while its bytes are unchanged. Compute the flagged values.
            self.tensor = array.detach().resolve_conj().resolve_neg().contiguous()
            self.size = self.tensor.numel() * self.tensor.element_size()
            self.is_on_gpu = self.tensor.device.type == "cuda"
        else:
            self.dtype = _named(name, str(array.dtype), _OF_NUMPY.get(array.dtype.name))
            self._little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
            self.size = self._little.nbytes

    @cached_property
    def address(self) -> int:
        """The bytes' address in CPU memory. Reading this copies GPU tensors."""
        if hasattr(self, "tensor"):
            self._on_cpu = self.tensor.cpu()
            return self._on_cpu.data_ptr()
        return int(self._little.ctypes.data)

    @property
    def data(self) -> memoryview:
        # Don't view the bytes by Tensor.numpy(), because numpy may not be installed.
        return memoryview((ctypes.c_ubyte * self.size).from_address(self.address))


def made(dtype: str, shape: list[int], data: bytearray, *, of: Library) -> object:
    """Make an array of the library `of` ("torch" or "numpy") from bytes.

    Raises:
        CheckpointError: The bytes do not fit dtype and shape, or the library is missing.
    """
    try:
        return _MAKERS[of](dtype, shape, data)
    except ImportError as error:
        raise CheckpointError(f"it has arrays of {of}, which is not installed here") from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"it has an array that can't be made: {error}") from error


def _made_by_torch(dtype: str, shape: list[int], data: bytearray) -> object:
    import torch

    kind = getattr(torch, TYPES.get(dtype, ("", None))[0], None)
    if kind is None:
        raise ValueError(f"this torch has no type {dtype}")
    # torch.frombuffer refuses an empty buffer, so create an empty tensor instead.
    return (torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)).reshape(shape)


def _made_by_numpy(dtype: str, shape: list[int], data: bytearray) -> object:
    import numpy

    name = TYPES.get(dtype, ("", None))[1]
    if name is None:
        raise ValueError(f"numpy has no type {dtype}")
    return numpy.frombuffer(data, numpy.dtype(name).newbyteorder("<")).reshape(shape)


_MAKERS: dict[Library, Callable[[str, list[int], bytearray], object]] = {
    "torch": _made_by_torch,
    "numpy": _made_by_numpy,
}


def _of_torch(name: str, tensor: torch.Tensor) -> str:
    if sys.byteorder != "little":
        raise UserError("checkpoints are written in little endian, which this machine is not.")
    if type(tensor).__module__.startswith("torch.distributed"):
        raise UserError(
            f"{name!r} is a {type(tensor).__name__}: each rank has a part of it. Save what "
            "torch.distributed.checkpoint.state_dict gives with full_state_dict=True, or train with paceline.parallelize, "
            "whose par.save() writes the parts."
        )
    is_meta = tensor.device.type == "meta"
    if is_meta or tensor.layout is not sys.modules["torch"].strided or tensor.is_quantized:
        what = "on the meta device" if is_meta else "sparse or quantized"
        raise UserError(
            f"{name!r} is a tensor {what}; a checkpoint keeps dense values. Save its parts or make it dense."
        )
    return _named(name, str(tensor.dtype), _OF_TORCH.get(str(tensor.dtype)))


def _named(name: str, own: str, dtype: str | None) -> str:
    if dtype is None:
        raise UserError(f"{name!r} has the type {own}, which can't be stored. {', '.join(TYPES)} can.")
    return dtype
