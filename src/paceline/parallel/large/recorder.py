"""What a constructor does to parameters that have no memory, written down, and done later. Loaded on use: it imports torch.

The idea is that of torchdistx's `deferred_init`: each operation that touches a tensor on the meta device is kept with its
arguments; all others run as always. A parameter's values are then made by doing again what was done to it, and nothing else.
Random operations draw from a stream of the parameter's name, so that they give the same numbers whichever others are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.deterministic_rng import derive
from paceline.parallel.errors import ParallelError
from paceline.parallel.pytree import map_tensors, tensors_in
from paceline.torch_private import DispatchMode

#: Operations that give values to what had none.
_WRITES = frozenset((torch.ops.aten.fill_, torch.ops.aten.zero_, torch.ops.aten.copy_, torch.ops.aten.eye))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ref:
    """A tensor without memory among an operation's arguments. done: so much had been done to its storage before."""

    key: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    done: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    function: Any
    args: Any
    kwargs: dict[str, Any]
    is_random: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class _Entry:
    """A call that made a storage (output: which of its outputs, and how that lay), or that changed it (output None)."""

    call: _Call
    output: int | None = None
    like: _Ref | None = None


class Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, notes what is done to tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._logs: dict[int, list[_Entry]] = {}
        # Storages are known by their address, which another one would get if they went.
        self._alive: dict[int, Any] = {}
        self._is_off = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Note nothing until the block ends."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def begin(self, shell: Tensor) -> None:
        """Take the tensor for memory that nobody has written to yet."""
        self._logs[self._key(shell)] = []

    def note(self, function: Any, tensor: Tensor, *args: Any, is_random: bool = False, **kwargs: Any) -> None:
        """Note a call that writes to the tensor, its first argument, and reads no other one without memory."""
        log = self._logs.setdefault(self._key(tensor), [])
        call = _Call(function=function, args=(self._ref(tensor, len(log)), *args), kwargs=kwargs, is_random=is_random)
        log.append(_Entry(call=call))

    def knows(self, tensor: Tensor) -> bool:
        """True if what was done to it gives it values; what only changes values does not."""
        log = self._logs.get(tensor.untyped_storage()._cdata)
        if not log:
            return False
        function = log[0].call.function
        return (
            log[0].output is not None or log[0].call.is_random or getattr(function, "overloadpacket", None) in _WRITES
        )

    def began(self, tensor: Tensor) -> bool:
        """True if it is known, with values or without."""
        return tensor.untyped_storage()._cdata in self._logs

    def made(self, function: Any, tensors: list[Tensor]) -> None:
        """Called after an operation on tensors that all have memory, for those that look at them too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_meta]
        if not given:
            result = func(*args, **kwargs)
            made = tensors_in(result)
            if any(tensor.is_meta for tensor in made):
                self._note(func, args, kwargs, result)
            else:
                self.made(func, [*_written(func, args, kwargs), *made])
            return result
        for tensor in _written(func, args, kwargs):
            if not tensor.is_meta:
                raise ParallelError(
                    f"{func} reads the values of a parameter that has none yet, while a model is built under "
                    "paceline.parallel.empty(). Compute this after parallelize, or build that part of the model outside."
                )
        if func is torch.ops.aten._local_scalar_dense.default:
            raise ParallelError(
                "a number is read from a parameter that has no values yet (item(), bool(), float()), while a model is built "
                "under paceline.parallel.empty(). Compute it from the parameter's shape, or build that part outside."
            )
        before = [(tensor, len(self._logs.get(self._key(tensor), ()))) for tensor in given]
        told = {id(tensor): done for tensor, done in before}
        call_args, call_kwargs = self._refs(args, told), self._refs(kwargs, told)
        # torch refuses operations between devices; only shapes are asked for here.
        shapes = map_tensors((args, kwargs), lambda tensor: tensor if tensor.is_meta else _shape_of(tensor))
        result = func(*shapes[0], **shapes[1])
        self._note(func, call_args, call_kwargs, result, written=_written(func, args, kwargs), given=given)
        return result

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        written: Sequence[Tensor] = (),
        given: Sequence[Tensor] = (),
    ) -> None:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        call = _Call(function=func, args=args, kwargs=dict(kwargs), is_random=is_random)
        for key in dict.fromkeys(self._key(tensor) for tensor in written):
            self._logs.setdefault(key, []).append(_Entry(call=call))
        known = {self._key(tensor) for tensor in given}
        for number, tensor in enumerate(tensors_in(result)):
            key = self._key(tensor)
            # A view of an argument has its storage, and its log.
            if key not in known and tensor.is_meta:
                known.add(key)
                self._logs[key] = [_Entry(call=call, output=number, like=self._ref(tensor))]

    def _refs(self, values: Any, done: Mapping[int, int]) -> Any:
        # Copies of those with values: the constructor may go on changing them.
        def taken(tensor: Tensor) -> Any:
            return self._ref(tensor, done[id(tensor)]) if tensor.is_meta else tensor.detach().clone()

        return map_tensors(values, taken)

    def _ref(self, tensor: Tensor, done: int = 0) -> _Ref:
        return _Ref(
            key=self._key(tensor),
            size=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            done=done,
        )

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.setdefault(storage._cdata, storage)
        return int(storage._cdata)

    def value(self, tensor: Tensor, name: str, seed: int, names: Mapping[int, str]) -> Tensor:
        """The tensor's values, whole and on the CPU: everything that was done to it, done again.

        name: whose stream random operations draw from. names: storage -> name, of the parameters it may have been made from.
        """
        ref = self._ref(tensor, len(self._logs[self._key(tensor)]))
        return _Replay(self._logs, name, seed, names).view(ref)


class _Replay:
    def __init__(self, logs: Mapping[int, list[_Entry]], name: str, seed: int, names: Mapping[int, str]) -> None:
        self._logs, self._name, self._seed, self._names = logs, name, seed, names
        self._states: dict[tuple[int, int], Tensor] = {}
        self._results: dict[int, list[Tensor]] = {}

    def view(self, ref: _Ref) -> Tensor:
        return self._state(ref).as_strided(ref.size, ref.stride, ref.offset)

    def _state(self, ref: _Ref) -> Tensor:
        """The storage as it was when so much had been done to it, flat."""
        found = self._states.get((ref.key, ref.done))
        if found is not None:
            return found
        whose = self._names.get(ref.key) or f"{self._name} / {len(self._states)}"
        generator = torch.Generator().manual_seed(derive(f"initialise {whose}", self._seed))
        flat = torch.empty(_extent(ref), dtype=ref.dtype)
        for entry in self._logs[ref.key][: ref.done]:
            if entry.output is not None:
                like = entry.like
                assert like is not None
                # What one device gives in rows another may give in columns.
                flat = torch.empty(max(_extent(like), _extent(ref)), dtype=like.dtype)
                made = self._made(entry.call, generator)[entry.output]
                flat.as_strided(like.size, like.stride, like.offset).copy_(made)
            else:
                self._run(entry.call, generator, self._around(ref.key, flat))
        self._states[ref.key, ref.done] = flat
        return flat

    def _around(self, key: int, flat: Tensor) -> Callable[[_Ref], Tensor]:
        return lambda own: flat if own.key == key else self._state(own)

    def _made(self, call: _Call, generator: torch.Generator) -> list[Tensor]:
        if id(call) not in self._results:
            self._results[id(call)] = tensors_in(self._run(call, generator, self._state))
        return self._results[id(call)]

    def _run(self, call: _Call, generator: torch.Generator, storage: Callable[[_Ref], Tensor]) -> Any:
        def real(value: Any) -> Any:
            if isinstance(value, _Ref):
                return storage(value).as_strided(value.size, value.stride, value.offset)
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if isinstance(value, torch.Generator):
                return None
            if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
                return type(value)(map(real, value))
            return value

        args, kwargs = real(tuple(call.args)), {key: real(value) for key, value in call.kwargs.items()}
        if not call.is_random:
            return call.function(*args, **kwargs)
        # Not every random operation takes a generator.
        before = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            return call.function(*args, **kwargs)
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


def _extent(ref: _Ref) -> int:
    """The count of numbers up to the last one that it reaches."""
    if 0 in ref.size:
        return 0
    return ref.offset + 1 + sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride, strict=True))


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that the operation changes."""
    found: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.name in kwargs else args[number] if number < len(args) else None
        found += tensors_in(value)
    return found


def _shape_of(tensor: Tensor) -> Tensor:
    # A number goes with tensors of every device, and its value may decide the type of what comes.
    return tensor if tensor.dim() == 0 else torch.empty_like(tensor, device="meta")
