"""List the tensors in a file of `torch.save` from the opcodes of its pickle.

The reader does not unpickle the file. For each pickled object it creates a `_Made` with the class's name and arguments.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Maximum number of opcodes to read, and of objects to visit. The pickle of a tensor has some 35 opcodes.
_MOST_OPCODES, _MOST_OBJECTS = 2_000_000, 1_000_000
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
#: Name of torch's storage class -> dtype of the values in it.
_TYPES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}


@dataclass(frozen=True)
class PickledTensor:
    """A tensor of the file. name: the keys that lead to it, such as "model.weight"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass
class _Made:
    """An object that unpickling would create.

    name, args: The class or function to call, and its arguments. entries: The object's items and state as (key, value).
    """

    name: str = ""
    args: tuple[object, ...] = ()
    entries: list[tuple[object, object]] = field(default_factory=list)


def tensors_of(data: bytes) -> tuple[list[PickledTensor], dict[str, object]]:
    """Return a pickle's tensors, and {name: value} of its numbers and texts.

    Raises:
        ValueError: The pickle is malformed, or too large.
    """
    tensors: list[PickledTensor] = []
    values: dict[str, object] = {}
    for name, found in _walk(_read(data)):
        if isinstance(found, _Made):
            if (tensor := _tensor(name, found)) is not None:
                tensors.append(tensor)
        else:
            values[name] = found
    return tensors, values


def _read(data: bytes) -> object:
    stack: list[object] = []
    memo: dict[object, object] = {}
    for number, (op, value, _) in enumerate(pickletools.genops(data)):
        if number >= _MOST_OPCODES:
            raise ValueError(f"its pickle has more than {_MOST_OPCODES:,} opcodes")
        if op.name == "STOP":
            return _last(stack)
        if op.name == "MARK":
            stack.append(_MARK)
        elif "PUT" in op.name or op.name == "MEMOIZE":
            memo[len(memo) if value is None else value] = _last(stack)
        elif "GET" in op.name:
            stack.append(memo.get(value))
        else:
            _take(op, value, stack)
    raise ValueError("its pickle has no end")


def _take(op: pickletools.OpcodeInfo, value: object, stack: list[object]) -> None:
    """Execute one opcode: pop its inputs from the stack, and push its result."""
    inputs: list[object] = []
    fixed = op.stack_before
    if pickletools.markobject in fixed:
        fixed = fixed[: fixed.index(pickletools.markobject)]
        while (one := stack.pop() if stack else _MARK) is not _MARK:
            inputs.append(one)
        inputs.reverse()
    count = len(fixed)
    if len(stack) < count:
        raise ValueError("its pickle is malformed")
    before = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    if not op.stack_after:
        return
    name = op.name
    if name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in ("GLOBAL", "INST"):
        stack.append(_Made(str(value)))
    elif name == "STACK_GLOBAL":
        stack.append(_Made(" ".join(map(str, before))))
    elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
        made, args = before[0], before[1]
        stack.append(_Made(made.name if isinstance(made, _Made) else "", args if isinstance(args, tuple) else ()))
    elif name in ("SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS", "BUILD"):
        target, items = before[0], [*before[1:], *inputs]
        if isinstance(target, _Made) and name == "BUILD":
            target.entries.append(("", items[0]))
        elif isinstance(target, _Made):
            target.entries += (
                zip(items[::2], items[1::2], strict=False) if "SET" in name else enumerate(items, len(target.entries))
            )
        stack.append(target)
    elif name == "DICT":
        stack.append(_Made(entries=[*zip(inputs[::2], inputs[1::2], strict=False)]))
    elif "TUPLE" in name:
        stack.append((*before, *inputs))
    elif before or inputs or value is None:
        # For an empty collection, or an operation that this function does not know, keep the parts: some of them may be tensors.
        stack.append(_Made(args=(*before,), entries=[*enumerate(inputs)]))
    else:
        stack.append(value)


def _last(stack: list[object]) -> object:
    if not stack:
        raise ValueError("its pickle is malformed")
    return stack[-1]


def _walk(top: object) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of each tensor, number and text, visiting each collection once."""
    waiting, seen, count = [("", top)], set[int](), 0
    while waiting:
        name, found = waiting.pop()
        count += 1
        if count > _MOST_OBJECTS:
            raise ValueError(f"its pickle has more than {_MOST_OBJECTS:,} objects")
        if isinstance(found, (int, float, str)):
            yield name, found
        parts: list[tuple[object, object]] = []
        if isinstance(found, _Made) and "_rebuild_" in found.name:
            # A tensor may have several names. Yield it once for each name.
            yield name, found
            # Look at the parts of a tensor, too: a parameter, or an object of a tensor's subclass, contains another tensor.
            parts += [("", part) for part in found.args if isinstance(part, _Made) and "_rebuild_" in part.name]
            parts += [("", _Made(part.name, args)) for part, args in _calls(found)]
        elif isinstance(found, (_Made, tuple)) and id(found) not in seen:
            seen.add(id(found))
            parts += enumerate(found) if isinstance(found, tuple) else found.entries
        waiting += [(".".join(filter(None, (name, str(key)[:300]))), part) for key, part in reversed(parts)]


def _calls(made: _Made) -> Iterator[tuple[_Made, tuple[object, ...]]]:
    match made.args:
        case [_Made() as function, _, tuple() as args, *_] if "_from_type" in made.name:
            yield function, args


def _tensor(name: str, made: _Made) -> PickledTensor | None:
    """Return the tensor that `made`, such as `_rebuild_tensor_v2(storage, offset, size)`, creates, else None."""
    match made.args:
        case [_Made(args=[("storage", _Made(name=storage), *_)]), int(), tuple() as size, *rest]:
            given = [one.name for one in rest if isinstance(one, _Made) and one.name.startswith("torch ")]
            kind = storage.rpartition(" ")[2]
            dtype = _TYPES.get(kind) or (given[0].partition(" ")[2] if given else kind)
            if all(type(one) is int and one >= 0 for one in size):
                return PickledTensor(name, dtype, tuple(one for one in size if isinstance(one, int)))
    return None
