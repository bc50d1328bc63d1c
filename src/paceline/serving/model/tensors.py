"""JSON tensors of the Open Inference Protocol, version 2 (https://github.com/kserve/open-inference-protocol)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.serving.model.answers import InputError, OutputError, parsed
from paceline.serving.model.runners.base import TensorInfo

if TYPE_CHECKING:
    from paceline.serving.model.runners.base import Array

DTYPES = {
    **{"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64"},
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
}
#: Name of a numpy or torch type -> datatype of the Open Inference Protocol.
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}


def read_request(body: bytes, inputs: list[TensorInfo]) -> tuple[dict[str, Array], list[str] | None, str | None]:
    """Return a JSON request's tensors, requested outputs (None: default) and id (or None).

    Raises:
        InputError: The body is not a request of the protocol, or names unknown inputs.
    """
    value = parsed(body)
    listed = value.get("inputs") if isinstance(value, dict) else None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise InputError('the body should be {"inputs": [{"name", "shape", "datatype", "data"}, ...]}.')
    tensors: dict[str, Array] = {}
    for each in listed:
        name = each.get("name")
        if not isinstance(name, str) or name in tensors:
            raise InputError(f"an input's name should be a text of its own, not {str(name)[:100]!r}.")
        tensors[name] = _tensor(each, f"input {name[:100]!r}")
    wanted = value.get("outputs")
    if wanted is not None and not (
        isinstance(wanted, list)
        and all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in wanted)
    ):
        raise InputError('outputs should be [{"name": ...}, ...].')
    id_ = value.get("id")
    names = [each["name"] for each in wanted] if wanted else None
    return named(tensors, inputs), names, id_ if isinstance(id_, str) else None


def named(tensors: dict[str, Array], inputs: list[TensorInfo]) -> dict[str, Array]:
    """Return a request's tensors as {name of the model's input: tensor}.

    Raises:
        InputError: A tensor is missing or unknown, or has a shape that the model does not accept.
    """
    names = [each.name for each in inputs]
    if len(tensors) == 1 == len(names):
        tensors = {names[0]: next(iter(tensors.values()))}
    check_known("input", tensors, names)
    for info in inputs:
        if info.name not in tensors:
            raise InputError(f"the input {info.name!r} is missing.")
        shape = tensors[info.name].shape
        if info.shape is not None and not fits(shape, info.shape, -1):
            raise InputError(f"the input {info.name!r} should be of shape {list(info.shape)}, not {list(shape)}.")
    return tensors


def check_known(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise InputError if the model lacks an input or output of these names."""
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"the model has no {what} {unknown[0][:100]!r}. It has {', '.join(known)}.")


def fits(shape: Sequence[int], wanted: Sequence[int | None], any_size: int | None) -> bool:
    """Return whether a shape equals `wanted`, in which `any_size` stands for any size."""
    return len(shape) == len(wanted) and all(want in (any_size, got) for want, got in zip(wanted, shape, strict=True))


def array_of(value: object, where: str) -> Array:
    """Convert nested JSON lists to a numpy array. `where` is their location, for errors."""
    try:
        return np.array(value)
    except ValueError:
        raise InputError(f"{where}: its lists differ in length.") from None


def from_lists(value: object, info: TensorInfo) -> Array:
    """Convert nested JSON lists to an input of the model.

    Raises:
        InputError: Lists of one level differ in length, or a value does not have the type of the input.
    """
    where = f"the input {info.name!r}"
    if not isinstance(value, list):
        raise InputError(f"{where} should be a list of rows.")
    return _of_datatype(value, info.datatype if info.datatype in (*DTYPES, "BYTES") else "FP32", where)


def as_dtype(array: Array, dtype: Any, wrong: str) -> Array:
    """Cast an array, or raise InputError(wrong) if values do not fit."""
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype)
    if (made.dtype.kind in "iub" and not (made == array).all()) or (made.dtype.kind in "fc" and np.isinf(made).any()):
        raise InputError(wrong)
    return made


def tensor(name: str, value: Any) -> dict[str, object]:
    """Return an output as a tensor of the Open Inference Protocol."""
    array = np.asarray(value)
    data = array.reshape(-1).tolist()
    if array.dtype.kind == "O" and not all(isinstance(each, str) for each in data):
        raise OutputError(f"the output {name!r} is not a tensor; ask /score for it.")
    return {"name": name, "shape": list(array.shape), "datatype": datatype_of(array.dtype), "data": data}


def datatype_of(dtype: Any) -> str:
    """Return the protocol's name of a numpy dtype, "BYTES" for objects."""
    return "BYTES" if dtype.kind in "USO" else DATATYPES.get(dtype.name, "FP64")


def _of_datatype(value: object, datatype: str, where: str) -> Array:
    array = array_of(value, where)
    if datatype == "BYTES":
        # numpy would convert the number of ["a", 1] to text.
        texts = np.array(value, dtype=object)
        if not all(isinstance(each, str) for each in texts.flat):
            raise InputError(f"{where} should hold texts alone.")
        return texts
    if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise InputError(f"{where} should hold numbers alone, none of them too large.")
    return as_dtype(array, DTYPES[datatype], f"{where} has values that {datatype} does not hold.")


def _tensor(each: dict[str, object], where: str) -> Array:
    shape, datatype, data = each.get("shape"), str(each.get("datatype")), each.get("data")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InputError(f"{where}: shape should be a list of sizes.")
    if datatype not in DTYPES and datatype != "BYTES":
        raise InputError(f"{where}: datatype {datatype[:50]!r} is not one of {', '.join(DTYPES)}, BYTES.")
    if not isinstance(data, list):
        raise InputError(f"{where}: data should be a list. Tensors in binary are not taken.")
    array = _of_datatype(data, datatype, f"{where}: data")
    if array.size != math.prod(shape):
        raise InputError(f"{where}: shape {shape} has {math.prod(shape)} values, and data has {array.size}.")
    try:
        return array.reshape(shape)
    except ValueError as reason:
        raise InputError(f"{where}: {reason}.") from None
