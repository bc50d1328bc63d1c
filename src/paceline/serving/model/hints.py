"""Convert type hints into checks of JSON values, and into JSON Schema.

float int str bool None Any         as in JSON; float accepts whole numbers, int accepts no fractions
list tuple set dict, X | Y          with checked items
Literal, Enum                       one of the values
dataclass, TypedDict, NamedTuple    an object without unknown or missing keys
bytes                               base64
datetime, date                      ISO 8601
numpy.ndarray, NDArray[float32]     nested lists of numbers; Annotated[NDArray[float32], (None, 64)] sets the shape
torch.Tensor                        the same; float32 if a number has a fraction, else int64
"""

from __future__ import annotations

import base64
import binascii
import collections.abc
import contextlib
import dataclasses
import datetime as dt
import enum
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from paceline.errors import ServingError
from paceline.serving.model.answers import InputError

Read = Callable[[object, str], object]

_LISTS = (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Set)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


class Hint(NamedTuple):
    """A conversion from JSON to values of a type hint.

    read: Converts a JSON value, or raises InputError with the value's location.
    schema: A JSON Schema of the values.
    """

    read: Read
    schema: dict[str, object]
    title: str


class Hints:
    """A converter for the type hints of one function.

    schemas: Name of a class -> JSON Schema of the class. Other schemas refer to it by the name.
    """

    def __init__(self) -> None:
        self.schemas: dict[str, object] = {}
        self._known: dict[object, Hint] = {}

    def of(self, hint: Any) -> Hint:
        """Return the conversion and the JSON Schema of a type hint.

        Raises:
            ServingError: The hint has no JSON form.
        """
        if hint in (Any, object, inspect.Parameter.empty):
            return Hint(lambda value, where: value, {}, "anything")
        if isinstance(hint, (type, types.NoneType)) and hint in _PLAIN:
            return _PLAIN[hint]
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            shape = next((each for each in arguments[1:] if isinstance(each, tuple)), None)
            return _array(arguments[0], shape) if _is_array(arguments[0]) else self.of(arguments[0])
        if _is_array(hint):
            return _array(hint, None)
        if origin in (typing.Union, types.UnionType):
            return _union([self.of(each) for each in arguments])
        if origin is typing.Literal:
            return _one_of(list(arguments), list(arguments))
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _one_of([each.value for each in hint], list(hint))
        return self._container(hint, origin or hint, arguments)

    def _container(self, hint: object, kind: Any, arguments: tuple[object, ...]) -> Hint:
        if kind is tuple and arguments and arguments[-1] is not Ellipsis:
            return _tuple([self.of(each) for each in arguments])
        if kind in (*_LISTS, tuple):
            made: Any = kind if kind in (tuple, set, frozenset) else list
            return _list(self.of(arguments[0]) if arguments else self.of(Any), made)
        if kind in _DICTS:
            key, value = arguments or (str, Any)
            if key is not str:
                raise ServingError(f"the type hint {_name(hint)}: keys of JSON are texts. Write dict[str, ...].")
            return _dict(self.of(value))
        if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind) or hasattr(kind, "_fields"):
            return self._object(kind)
        raise ServingError(
            f"the type hint {_name(hint)} can't be checked against JSON. Take numbers, texts, lists, dicts, Literal, "
            "dataclasses, TypedDict, numpy arrays, or Any for a value that the function checks itself."
        )

    def _object(self, kind: Any) -> Hint:
        if kind in self._known:
            return self._known[kind]
        name = kind.__name__
        if name in self.schemas:
            raise ServingError(f"two types are named {name!r}. Give one of them another name.")
        self.schemas[name] = {}
        readers: dict[str, Read] = {}
        needed: set[str] = set()

        def read(value: object, where: str) -> object:
            fields = read_fields(value, where, readers, needed)
            try:
                return kind(**fields)
            except ValueError as reason:  # a check in the class, such as in `__post_init__`, has failed
                raise InputError(f"{where or 'the body'}: {reason}") from None

        self._known[kind] = Hint(read, {"$ref": f"#/components/schemas/{name}"}, f"an object ({name})")
        hints, required = _fields(kind)
        hints_by_field = {each: self.of(hint) for each, hint in hints.items()}
        readers |= {each: hint.read for each, hint in hints_by_field.items()}
        needed |= required
        self.schemas[name] = object_schema(hints_by_field, needed)
        return self._known[kind]


def object_schema(fields: dict[str, Hint], needed: set[str]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {name: hint.schema for name, hint in fields.items()},
        "required": [name for name in fields if name in needed],
        "additionalProperties": False,
    }


def read_fields(value: object, where: str, fields: dict[str, Read], needed: set[str]) -> dict[str, object]:
    """Return the converted fields of a JSON object.

    where: Location of the object in the request, for error messages.
    fields: Name of a field -> its conversion.
    needed: Names of fields that must be present.

    Raises:
        InputError: The value is not an object, a key is unknown or missing, or a field's value is not valid.
    """
    at = f"{where}." if where else ""
    if not isinstance(value, dict):
        raise InputError(f"{where or 'the body'} should be an object, not {shown(value)}.")
    for name in value:
        if name not in fields:
            raise InputError(f"{at}{name[:100]}: there is no such field. There are {', '.join(fields)}.")
    for name in fields:
        if name in needed and name not in value:
            raise InputError(f"{at}{name} is missing.")
    return {name: fields[name](each, f"{at}{name}") for name, each in value.items()}


def shown(value: object) -> str:
    """Describe a JSON value for error messages, such as "a list of 3"."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value) if isinstance(value, (bool, types.NoneType)) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _wrong(value: object, where: str, wanted: str) -> InputError:
    return InputError(f"{where} should be {wanted}, not {shown(value)}.")


def _only(kind: type, title: str, name: str) -> Hint:
    def read(value: object, where: str) -> object:
        if type(value) is not kind:
            raise _wrong(value, where, title)
        return value

    return Hint(read, {"type": name}, title)


def _float(value: object, where: str) -> float:
    if type(value) not in (float, int):
        raise _wrong(value, where, "a number")
    try:
        number = float(cast(float, value))
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{where} is too large for a number.")
    return number


def _int(value: object, where: str) -> int:
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    raise _wrong(value, where, "a whole number")


def _bytes(value: object, where: str) -> bytes:
    try:
        return base64.b64decode(cast(str, value), validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise _wrong(value, where, "a text in base64") from None


def _time(kind: type[dt.datetime] | type[dt.date], title: str, form: str) -> Hint:
    def read(value: object, where: str) -> object:
        try:
            # Python 3.10 does not accept the "Z" for UTC.
            return kind.fromisoformat(cast(str, value).replace("Z", "+00:00"))
        except (AttributeError, TypeError, ValueError):
            raise _wrong(value, where, title) from None

    return Hint(read, {"type": "string", "format": form}, title)


#: Type hint without item types, such as str -> the object that reads values of this type from JSON.
_PLAIN: dict[object, Hint] = {
    str: _only(str, "a text", "string"),
    bool: _only(bool, "true or false", "boolean"),
    **dict.fromkeys((None, types.NoneType), _only(types.NoneType, "null", "null")),
    float: Hint(_float, {"type": "number"}, "a number"),
    int: Hint(_int, {"type": "integer"}, "a whole number"),
    bytes: Hint(_bytes, {"type": "string", "contentEncoding": "base64"}, "a text in base64"),
    dt.datetime: _time(dt.datetime, "a time as 2026-01-31T12:00:00", "date-time"),
    dt.date: _time(dt.date, "a date as 2026-01-31", "date"),
}


def _list(each: Hint, kind: Any) -> Hint:
    read_one = each.read

    def read(value: object, where: str) -> object:
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        # Convert a list of plain numbers in one pass, because the location of an item is only needed for an error message.
        with contextlib.suppress(OverflowError):  # a whole number that no float holds
            if read_one is _float and set(map(type, value)) <= {float, int} and all(map(math.isfinite, value)):
                return kind(map(float, value))
        items = [read_one(item, f"{where}[{at}]") for at, item in enumerate(value)]
        try:
            return items if kind is list else kind(items)
        except TypeError:
            raise InputError(f"{where} has an item that a set can't hold.") from None

    unique = {"uniqueItems": True} if kind in (set, frozenset) else {}
    return Hint(read, {"type": "array", "items": each.schema, **unique}, "a list")


def _tuple(items: list[Hint]) -> Hint:
    def read(value: object, where: str) -> object:
        if not isinstance(value, list) or len(value) != len(items):
            raise _wrong(value, where, f"a list of {len(items)}")
        return tuple(
            hint.read(item, f"{where}[{at}]") for at, (hint, item) in enumerate(zip(items, value, strict=True))
        )

    schema = {"prefixItems": [hint.schema for hint in items], "minItems": len(items), "maxItems": len(items)}
    return Hint(read, {"type": "array", **schema}, f"a list of {len(items)}")


def _dict(each: Hint) -> Hint:
    def read(value: object, where: str) -> object:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        return {name: each.read(item, f"{where}[{name[:100]!r}]") for name, item in value.items()}

    return Hint(read, {"type": "object", "additionalProperties": each.schema}, "an object")


def _union(parts: list[Hint]) -> Hint:
    title = " or ".join(dict.fromkeys(hint.title for hint in parts))
    # Try float last, because it would also accept integers and convert them to floats.
    order = sorted(parts, key=lambda hint: hint.read is _float)

    def read(value: object, where: str) -> object:
        reasons = []
        for hint in order:
            try:
                return hint.read(value, where)
            except InputError as reason:
                reasons.append(reason)
        # If exactly one alternative accepted the value itself but failed at an item inside the value, report that failure.
        inside = [reason for reason in reasons if not str(reason).startswith(f"{where} should be")]
        raise inside[0] if len(inside) == 1 else _wrong(value, where, title)

    return Hint(read, {"anyOf": [hint.schema for hint in parts]}, title)


def _one_of(values: Sequence[object], meant: Sequence[object]) -> Hint:
    title = f"one of {', '.join(map(shown, values))}"

    def read(value: object, where: str) -> object:
        for each, stands_for in zip(values, meant, strict=True):
            # Compare the types too, because 1 == True is true in Python, but True is not a number in JSON.
            if type(value) is type(each) and value == each:
                return stands_for
        raise _wrong(value, where, title)

    return Hint(read, {"enum": values}, title)


def _is_array(hint: object) -> bool:
    kind = typing.get_origin(hint) or hint
    return isinstance(kind, type) and (kind.__module__.partition(".")[0], kind.__name__) in (
        ("numpy", "ndarray"),
        ("torch", "Tensor"),
    )


def _array(hint: object, shape: tuple[int | None, ...] | None) -> Hint:
    is_tensor = getattr(typing.get_origin(hint) or hint, "__name__", None) == "Tensor"
    dtype = None
    if len(arguments := typing.get_args(hint)) == 2 and (inner := typing.get_args(arguments[1])):
        # Ignore numpy's abstract scalar types, such as `number`: no array can have such a type.
        dtype = inner[0] if isinstance(inner[0], type) and not inspect.isabstract(inner[0]) else None
    title = "a list of numbers" if shape is None else f"numbers of shape {_shape(shape)}"

    def read(value: object, where: str) -> object:
        import numpy as np

        from paceline.serving.model.tensors import array_of, as_dtype, fits

        if not isinstance(value, list):
            raise _wrong(value, where, title)
        array = array_of(value, where)
        if array.dtype.kind not in "biuf":
            raise InputError(f"{where} should hold numbers alone.")
        if not np.isfinite(array).all():
            raise InputError(f"{where} has a number that is too large.")
        if shape is not None and not fits(array.shape, shape, None):
            raise InputError(f"{where} should be {title}, not {_shape(array.shape)}.")
        wanted = {"f": np.float32, "b": np.bool_}.get(array.dtype.kind, np.int64) if is_tensor else dtype
        if wanted is not None:
            with contextlib.suppress(TypeError):
                array = as_dtype(array, wanted, f"{where} should hold values of {np.dtype(wanted).name} alone.")
        if is_tensor:
            import torch

            return torch.from_numpy(array)
        return array

    schema: dict[str, object] = {"type": "number"}
    if shape is None:
        return Hint(read, {"type": "array", "items": {}}, title)
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, **({} if size is None else {"minItems": size, "maxItems": size})}
    return Hint(read, schema, title)


def _shape(shape: Sequence[int | None]) -> str:
    return " x ".join("any" if size is None else str(size) for size in shape) or "one number"


def _fields(kind: Any) -> tuple[dict[str, object], set[str]]:
    """Return the hints of a class's fields, and the names of fields without a default."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        own = {each.name: each for each in dataclasses.fields(kind) if each.init}
        missing = dataclasses.MISSING
        needed = {name for name, each in own.items() if each.default is missing and each.default_factory is missing}
        return {name: hints[name] for name in own}, needed
    if typing.is_typeddict(kind):
        return {name: _bare(hint) for name, hint in hints.items()}, set(kind.__required_keys__)
    return {name: hints.get(name, Any) for name in kind._fields}, set(kind._fields) - set(kind._field_defaults)


def _bare(hint: object) -> object:
    """Remove the wrapper Required, NotRequired or ReadOnly from a type hint."""
    name = getattr(typing.get_origin(hint), "_name", None)
    return typing.get_args(hint)[0] if name in ("Required", "NotRequired", "ReadOnly") else hint


def _name(hint: object) -> str:
    return getattr(hint, "__name__", None) or str(hint)
