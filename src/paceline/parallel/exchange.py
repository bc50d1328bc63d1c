"""Exchange of plain values between ranks, over the process groups that also carry tensors.

torch's own functions (`all_gather_object`, `broadcast_object_list`) send pickles, and Gloo does not authenticate. So
any process that reaches a rank's port could run code on the rank. This module sends JSON, which can only describe plain
values, and the bytes of tensors:

    8 bytes: length of the JSON | JSON | bytes of the tensors, one after the other

A forged message can have wrong values, but it cannot run code.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.errors import ParallelError

_KEY = "$"
_HEAD_BYTES = 8
_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_MAPPINGS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NAMES = {kind: name for name, kind in (*_SEQUENCES.items(), *_MAPPINGS.items())}


_T = TypeVar("_T")


class NotPlainError(ParallelError):
    """A value has a type that messages cannot hold.

    `kind` is the name of that type. All ranks raise this error.
    """

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__(
            f"rank {rank} has to tell the others a {kind}, which is neither a number, a text, a list, a dict nor a tensor."
        )
        self.kind = kind


def gather(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the values of all ranks, tensors on the CPU.

    Every rank of the group must call this. In a world of one process the result has the value itself, of any type. A numpy
    number arrives as a Python number.

    Args:
        value: None, numbers, strings, bytes, torch dtypes and devices, tensors, and lists, tuples, sets and dicts of these.
        group: The ranks that take part. None: the world.

    Raises:
        NotPlainError: On every rank, if one rank's value has another type.
        ParallelError: A received message is malformed.
    """
    if (known := journal.read("gather")) is not None:
        return list(known[0])
    if _is_alone(group):
        return [value]
    everyone = _gathered(value, group)
    journal.note("gather", everyone)
    return everyone


def _gathered(value: _T, group: dist.ProcessGroup | None) -> list[_T]:
    data, device = _packed_or_refused(value), _device(group)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    # First gather the lengths of all messages. Then pad each message to the longest, because a collective needs equal sizes.
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(of_rank) for of_rank in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    messages = [part[:length].cpu() for part, length in zip(parts, lengths, strict=True)]
    return [_taken(message, rank, ()) for rank, message in enumerate(messages)]


def from_first(value: _T, kinds: Sequence[type] = ()) -> _T:
    """Return rank 0's value on every rank.

    Every rank must call this. `value` has a type that `gather` accepts, or contains dataclasses of the classes `kinds`.

    Raises:
        NotPlainError, ParallelError: For the reasons given in `gather`.
    """
    if (known := journal.read("from_first")) is not None:
        return known[0]  # type: ignore[no-any-return]
    if _is_alone(None):
        return value
    first = from_rank(value, 0, kinds)
    journal.note("from_first", first)
    return first


def from_rank(value: _T, root: int, kinds: Sequence[type] = ()) -> _T:
    """Return rank `root`'s value on every rank, as `from_first` does for rank 0."""
    device, is_root = _device(None), dist.get_rank() == root
    data = (_packed_or_refused(value, kinds) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")).to(device)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    dist.broadcast(size, root)
    # On ranks other than the root `data` is empty, so enlarge it to the size of the root's message.
    data.resize_(int(size))
    dist.broadcast(data, root)
    sent: _T = _taken(data.cpu(), root, kinds)
    return sent


class Journal:
    """The results of the messages that set up a training, equal on all ranks.

    A rank that replaces a lost rank sets up its training alone: `gather` and `from_first` return these results to it.

    Attributes:
        is_kept: Whether to add results.
        is_read: Whether this rank reads results instead of communicating.
    """

    def __init__(self) -> None:
        self.results: list[tuple[str, Any]] = []
        self.is_kept = self.is_read = False
        self._next = 0

    def note(self, call: str, result: object) -> None:
        if self.is_kept:
            self.results.append((call, result))

    def read(self, call: str) -> tuple[Any] | None:
        """Return the next recorded result as (result,). None: this rank must communicate.

        Raises:
            ParallelError: The next recorded result belongs to another call.
        """
        if not self.is_read:
            return None
        self._next += 1
        if self._next > len(self.results) or self.results[self._next - 1][0] != call:
            raise ParallelError(
                "this rank replaces a lost rank, and its script sets up the training in another way than the other ranks' "
                "scripts did. Let the script do the same in each start."
            )
        return (self.results[self._next - 1][1],)


#: Results of the messages that set up the training. A new rank that replaces a lost rank gets them.
journal = Journal()


def packed(value: object, kinds: Sequence[type] = ()) -> Tensor:
    """Serialize the value as a uint8 tensor.

    Raises:
        TypeError: The value contains an object of a type that `gather` does not allow. The message is the type's name.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_encoded(value, kinds, tensors)).encode()
    head = len(text).to_bytes(_HEAD_BYTES, "little") + text
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *map(_bytes_of, tensors)])


def unpacked(data: Tensor, kinds: Sequence[type] = ()) -> Any:
    """Return the value that `packed` has serialized, or raise ValueError."""
    length = int.from_bytes(data[:_HEAD_BYTES].numpy().tobytes(), "little")
    text, rest = data[_HEAD_BYTES : _HEAD_BYTES + length], data[_HEAD_BYTES + length :]
    try:
        # `_Reader` creates only plain values, so the worst effect of a forged message is one of the exceptions caught below.
        return _Reader(rest, kinds).value(json.loads(text.numpy().tobytes()))
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _packed_or_refused(value: object, kinds: Sequence[type] = ()) -> Tensor:
    try:
        return packed(value, kinds)
    except TypeError as error:
        # Send the error's text instead of the value, so that all ranks raise an error instead of waiting for this rank's value.
        return packed(_Refused(str(error)))


def _taken(data: Tensor, rank: int, kinds: Sequence[type]) -> Any:
    try:
        value = unpacked(data, kinds)
    except ValueError as error:
        raise ParallelError(
            f"the message from rank {rank} is malformed ({error}). Do all ranks have the same version of "
            "Paceline? Does another program use their ports?"
        ) from error
    if isinstance(value, _Refused):
        raise NotPlainError(value.kind, rank)
    return value


@dataclasses.dataclass(frozen=True)
class _Refused:
    kind: str


def _encoded(value: Any, kinds: Sequence[type], tensors: list[Tensor]) -> object:
    """Return the value as JSON, and append its tensors to `tensors`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(item, kinds, tensors) for item in value]
    if kind is dict and all(type(key) is str for key in value) and _KEY not in value:
        return {key: _encoded(item, kinds, tensors) for key, item in value.items()}
    name, of = _tagged(value, kinds, tensors)
    return {_KEY: name, "of": of}


def _tagged(value: Any, kinds: Sequence[type], tensors: list[Tensor]) -> tuple[str, object]:
    kind = type(value)
    if kind in _SEQUENCES.values():
        return _NAMES[kind], [_encoded(item, kinds, tensors) for item in value]
    if kind in _MAPPINGS.values():
        pairs = [[_encoded(key, kinds, tensors), _encoded(item, kinds, tensors)] for key, item in value.items()]
        return _NAMES[kind], pairs
    if kind in kinds:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return kind.__name__, {name: _encoded(item, kinds, tensors) for name, item in fields.items()}
    match value:
        case _Refused():
            return "refused", value.kind
        case bytes() if kind is bytes:
            return "bytes", base64.b64encode(value).decode()
        case complex() if kind is complex:
            return "complex", [value.real, value.imag]
        case torch.dtype() | torch.device():
            return kind.__name__, str(value).removeprefix("torch.")
        case Tensor() if value.layout == torch.strided and not value.is_quantized:
            tensors.append(value.detach())
            return "tensor", [str(value.dtype).removeprefix("torch."), list(value.shape)]
    is_number = kind.__module__ == "numpy" and getattr(value, "shape", None) == ()
    if is_number and type(value.item()) in (bool, int, float, str):
        return "number", value.item()
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))


class _Reader:
    def __init__(self, rest: Tensor, kinds: Sequence[type]) -> None:
        self._rest = rest
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._single: dict[str, Callable[[Any], object]] = {
            "refused": lambda of: _Refused(str(of)),
            "bytes": base64.b64decode,
            "complex": lambda of: complex(*of),
            "dtype": _dtype,
            "device": torch.device,
            "number": lambda of: of,
            "tensor": lambda of: self._tensor(*of),
        }

    def value(self, encoded: object) -> object:
        match encoded:
            case list():
                return [self.value(item) for item in encoded]
            case {"$": name, "of": of}:
                return self._tagged(name, of)
            case dict() if _KEY not in encoded:
                return {key: self.value(item) for key, item in encoded.items()}
            case dict():
                raise KeyError("of")
        return encoded

    def _tagged(self, name: str, of: Any) -> object:
        if name in _SEQUENCES:
            return _SEQUENCES[name]([self.value(item) for item in of])
        if name in _MAPPINGS:
            return _MAPPINGS[name]({self.value(key): self.value(item) for key, item in of})
        if name in self._kinds:
            return self._kinds[name](**{field: self.value(item) for field, item in of.items()})
        return self._single[name](of)

    def _tensor(self, dtype: str, shape: list[int]) -> Tensor:
        kind = _dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        part, self._rest = self._rest[:size], self._rest[size:]
        # Copy the bytes: a tensor must start at a multiple of its item size, but these bytes may start anywhere.
        return part.clone().view(kind).reshape(shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a type of a tensor")
    return dtype


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the group's messages: the CPU if possible."""
    kinds = [part.partition(":")[0] for part in str(dist.get_backend_config(group)).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.cuda.current_device() if kinds[0] == "cuda" else 0)
