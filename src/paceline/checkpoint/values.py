"""A state taken apart into JSON and arrays, and put together again. Nothing of it is ever run: there is no pickle.

    {"w": tensor, "step": 3}   ->   {"$": "dict", "of": [["w", {"$": "tensor", "at": "w"}], ["step", 3]]}

What JSON has not is an object whose "$" names its kind: any object of JSON here is one of these, so no dict can be mistaken.
"""

from __future__ import annotations

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


def taken_apart(state: Any) -> tuple[Any, dict[str, Any]]:
    """What JSON can hold of the state, and its arrays by name: torch's tensors and numpy's arrays, as they are.

    What has `state_dict` and `load_state_dict` (a model, an optimizer, a scheduler, a sampler) is asked for its state.

    Raises:
        UserError: something in it is of a kind that can't be kept; the place is named.
    """
    arrays: dict[str, Any] = {}
    return _apart(state, (), arrays), arrays


def put_together(told: Any, array: Callable[[str, str], Any]) -> Any:
    """The state of which `told` is the JSON. array: gives the array of a name, of "torch" or "numpy".

    Raises:
        CheckpointError: it is no such JSON.
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
    # Last: a model is a mapping to nobody, but an own class of the user's may be both.
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _apart(value.state_dict(), path, arrays)
    if isinstance(value, dict) and kind.__module__.startswith(("torch.", "collections")):
        return {"$": "dict", "of": [[_key(k, path), _apart(v, (*path, str(k)), arrays)] for k, v in value.items()]}
    raise _refused(path, f"is a {kind.__module__}.{kind.__qualname__}")


def _key(key: Any, path: tuple[str, ...]) -> Any:
    if key is None or type(key) in (bool, int, str, float, tuple):
        return _apart(key, path, {})
    raise _refused(path, f"has the key {key!r}, a {type(key).__qualname__}; keys are texts and numbers. It")


def _kept(array: Any, path: tuple[str, ...], arrays: dict[str, Any]) -> str:
    name = stem = ".".join(path) or "value"
    number = 2
    # `{"a.b": x, "a": {"b": y}}` has one path for both. "__metadata__" is the format's own word.
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


def is_tensor(value: Any) -> bool:
    """True for a tensor of torch, which is not loaded for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _together(told: Any, array: Callable[[str, str], Any]) -> Any:
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
