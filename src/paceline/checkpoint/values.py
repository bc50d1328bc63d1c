"""States as JSON and arrays, and back. Nothing is ever executed: there is no pickle.

    {"w": tensor, "step": 3}   ->   {"$": "dict", "of": [["w", {"$": "tensor", "at": "w"}], ["step", 3]]}

A value that JSON lacks becomes an object whose "$" names its kind. Every dict is encoded this way, so none is ambiguous.

Arrays are stored as safetensors (https://github.com/huggingface/safetensors#format): little endian, row by row. Neither torch
nor numpy is imported unless an array of that library is requested.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import CheckpointError, UserError

_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_KINDS = {kind: name for name, kind in (*_SEQUENCES.items(), *_MAPPINGS.items())}
_DEEPEST = 200

#: The format's dtype -> torch's name, which old releases may lack, and numpy's name or None.
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


def encode_state(state: object) -> tuple[Any, dict[str, Any]]:
    """Split a state into JSON and its arrays by name.

    Objects with `state_dict` and `load_state_dict` (models, optimizers, schedulers, samplers) are replaced by their state.

    Raises:
        UserError: A value's type is not supported. The message names its place.
    """
    arrays: dict[str, Any] = {}
    return _apart(state, (), arrays), arrays


def decode_state(told: object, array: Callable[[str, str], Any]) -> Any:
    """Rebuild a state from its JSON. `array(name, library)` returns an array.

    Raises:
        CheckpointError: The JSON does not describe a state.
    """
    try:
        return _together(told, array)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"it says what no save() writes ({type(error).__name__}: {error})") from error


def _apart(value: Any, path: tuple[str, ...], arrays: dict[str, Any]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "of": repr(value)}
    if len(path) > _DEEPEST:
        raise _refused(path, "is nested too deeply, or contains itself")
    if is_tensor(value):
        return {"$": "tensor", "at": _kept(value, path, arrays)}
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        scalar = not isinstance(value, numpy.ndarray)
        return {"$": "scalar" if scalar else "array", "at": _kept(numpy.asarray(value), path, arrays)}
    if kind is list:
        return [_apart(item, (*path, str(number)), arrays) for number, item in enumerate(value)]
    if kind in _KINDS:
        if isinstance(value, Mapping):
            pairs = [[_key(key, path), _apart(item, (*path, str(key)), arrays)] for key, item in value.items()]
            return {"$": _KINDS[kind], "of": pairs}
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {"$": _KINDS[kind], "of": [_apart(item, (*path, str(n)), arrays) for n, item in enumerate(items)]}
    if kind is complex:
        return {"$": "complex", "of": [repr(value.real), repr(value.imag)]}
    if kind in (bytes, bytearray):
        return {"$": "bytes", "of": bytes(value).hex()}
    if kind.__module__ == "torch" and kind.__name__ in ("Size", "dtype", "device"):
        named = list(value) if kind.__name__ == "Size" else str(value)
        return {"$": kind.__name__.lower(), "of": named}
    # Last, because a user's class may be a mapping and have a state_dict too.
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _apart(value.state_dict(), path, arrays)
    if isinstance(value, dict) and kind.__module__.startswith(("torch.", "collections")):
        return {"$": "dict", "of": [[_key(k, path), _apart(v, (*path, str(k)), arrays)] for k, v in value.items()]}
    raise _refused(path, f"is a {kind.__module__}.{kind.__qualname__}")


def _key(key: object, path: tuple[str, ...]) -> Any:
    if key is None or type(key) in (bool, int, str, float, tuple):
        return _apart(key, path, {})
    raise _refused(path, f"has the key {key!r}, a {type(key).__qualname__}; keys are texts and numbers. It")


def _kept(array: object, path: tuple[str, ...], arrays: dict[str, object]) -> str:
    name = stem = ".".join(path) or "value"
    number = 2
    # `{"a.b": x, "a": {"b": y}}` has the same path twice, and the format reserves "__metadata__".
    while name in arrays or name == "__metadata__":
        name, number = f"{stem}#{number}", number + 1
    arrays[name] = array
    return name


def _refused(path: tuple[str, ...], what: str) -> UserError:
    place = "".join(f"[{part!r}]" for part in path)
    return UserError(
        f"state{place} {what}, which a checkpoint can't keep: it has numbers, texts, bytes, lists, tuples, sets, dicts, "
        "tensors of torch, arrays of numpy, and what has state_dict() and load_state_dict(). Give its values instead."
    )


def is_tensor(value: object) -> bool:
    """Return True for a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _together(told: object, array: Callable[[str, str], Any]) -> object:
    if isinstance(told, list):
        return [_together(item, array) for item in told]
    if not isinstance(told, dict):
        return told
    kind = told["$"]
    if kind in ("tensor", "array", "scalar"):
        found = array(told["at"], "torch" if kind == "tensor" else "numpy")
        return found[()] if kind == "scalar" else found
    of = told["of"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_together(item, array) for item in of)
    if kind in _MAPPINGS:
        mapping = _MAPPINGS[kind]()
        for key, item in of:
            mapping[_together(key, array)] = _together(item, array)
        return mapping
    if kind == "float":
        return float(of)
    if kind == "complex":
        return complex(*map(float, of))
    if kind == "bytes":
        return bytes.fromhex(of)
    if kind in ("size", "dtype", "device"):
        import torch

        if kind == "size":
            return torch.Size(of)
        if kind == "device":
            return torch.device(of)
        dtype = getattr(torch, str(of).removeprefix("torch."))
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{of} is no type of torch")
        return dtype
    raise ValueError(f"a value of kind {kind!r}")


class DenseArray:
    """An array as contiguous bytes, ready to be written.

    Attributes:
        dtype: The format's name.
        data: The bytes, shared with the array or a copy.
    """

    def __init__(self, name: str, array: Any, *, copy: bool) -> None:
        """Wrap an array. With `copy`, later changes of the array do not reach the bytes.

        Raises:
            UserError: The format lacks its dtype, or it has no values on this process.
        """
        self.name, self.shape = name, [int(size) for size in array.shape]
        if is_tensor(array):
            self.dtype = _of_torch(name, array)
            # Copy these rows alone to the CPU: a view may be a small part of a large storage.
            tensor = array.detach()
            tensor = tensor.to("cpu", copy=True) if copy or tensor.device.type != "cpu" else tensor
            # A conjugated or negated tensor may be only flagged so, with the original's bytes.
            self._held: Any = tensor.resolve_conj().resolve_neg().contiguous()
            size, address = self._held.numel() * self._held.element_size(), self._held.data_ptr()
        else:
            self.dtype = _named(name, str(array.dtype), _OF_NUMPY.get(array.dtype.name))
            little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=copy)
            self._held = little if little.flags.c_contiguous else little.copy("C")
            size, address = self._held.nbytes, self._held.ctypes.data
        # numpy's view of a tensor would need numpy, which may be missing.
        self.data = memoryview((ctypes.c_ubyte * size).from_address(address)) if size else memoryview(b"")
        self.size = size


def made(dtype: str, shape: list[int], data: bytearray, *, of: str) -> Any:
    """Return an array that owns `data`. `of` is "torch" or "numpy".

    Raises:
        CheckpointError: The bytes do not fit dtype and shape, or the library is missing.
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
        # torch.frombuffer refuses an empty buffer.
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
