"""Record a constructor's operations on parameters without memory, and replay them later.

As in torchdistx's `deferred_init`, each operation on a tensor of the meta device is recorded with its arguments. All
other operations run normally. A replay of the operations on one parameter gives this parameter's values. Random
operations draw from a stream seeded with the parameter's name, so the values do not depend on other replays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from paceline.parallel.deterministic_rng import derive
from paceline.parallel.errors import ParallelError
from paceline.parallel.pytree import map_tensors, tensors_in
from paceline.torch_private import DispatchMode

if TYPE_CHECKING:
    from torch.storage import UntypedStorage

    from paceline.torch_private import Operation

_T = TypeVar("_T")
_Args = tuple[Any, ...]
_Options = dict[str, object]

#: Operations to record, because they set the values of a tensor.
_WRITES = frozenset((torch.ops.aten.fill_, torch.ops.aten.zero_, torch.ops.aten.copy_, torch.ops.aten.eye))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ref:
    """A tensor without memory, as an argument of a recorded operation.

    `key` identifies its storage. `done` is the number of earlier recorded operations on that storage.
    """

    key: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    done: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    function: Callable[..., object]
    args: _Args
    kwargs: _Options
    is_random: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class _Entry:
    """A recorded call that created or changed one storage.

    If the call created a tensor, `output` is its index in the results, and `like` its layout. Otherwise both are None.
    """

    call: _Call
    output: int | None = None
    like: _Ref | None = None


class Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """A torch dispatch mode that records operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._logs: dict[int, list[_Entry]] = {}
        # Keep the storages alive: `_logs` has their addresses as keys, and a new storage could get a freed address.
        self._alive: dict[int, UntypedStorage] = {}
        self._is_off = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Record nothing within the block."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def begin(self, shell: Tensor) -> None:
        """Start recording operations on this meta tensor, which has no values yet."""
        self._logs[self._key(shell)] = []

    def note(
        self, function: Callable[..., object], tensor: Tensor, *args: object, is_random: bool = False, **kwargs: object
    ) -> None:
        """Record function(tensor, *args, **kwargs), which overwrites the tensor, at random if `is_random`."""
        log = self._logs.setdefault(self._key(tensor), [])
        call = _Call(function=function, args=(self._ref(tensor, len(log)), *args), kwargs=kwargs, is_random=is_random)
        log.append(_Entry(call=call))

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the recorded operations initialise the tensor."""
        log = self._logs.get(tensor.untyped_storage()._cdata)
        if not log:
            return False
        function = log[0].call.function
        return (
            log[0].output is not None or log[0].call.is_random or getattr(function, "overloadpacket", None) in _WRITES
        )

    def began(self, tensor: Tensor) -> bool:
        """Return whether operations on this tensor are recorded."""
        return tensor.untyped_storage()._cdata in self._logs

    def made(self, function: Operation, tensors: list[Tensor]) -> None:
        """Let a subclass handle an operation that wrote or returned tensors with memory."""

    def __torch_dispatch__(
        self, func: Operation, types: Sequence[type], args: _Args = (), kwargs: _Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        empty = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_meta]
        if not empty:
            result = func(*args, **kwargs)
            made = tensors_in(result)
            if any(tensor.is_meta for tensor in made):
                self._note(func, args, kwargs, result)
            else:
                self.made(func, [*_written(func, args, kwargs), *made])
            return result
        written = _written(func, args, kwargs)
        for tensor in written:
            if not tensor.is_meta:
                raise ParallelError(
                    f"{func} reads the values of a parameter under paceline.parallel.empty(), where parameters "
                    "have no values yet. Compute this after parallelize, or build that part of the model outside."
                )
        if func is torch.ops.aten._local_scalar_dense.default:
            raise ParallelError(
                "a number is read from a parameter that has no values yet (item(), bool(), float()), while a model is built "
                "under paceline.parallel.empty(). Compute it from the parameter's shape, or build that part outside."
            )
        done = {id(tensor): len(self._logs.get(self._key(tensor), ())) for tensor in empty}
        call_args, call_kwargs = self._refs(args, done), self._refs(kwargs, done)
        # Run on meta tensors: torch refuses operations between devices, and only the shapes matter here.
        shapes = map_tensors((args, kwargs), lambda tensor: tensor if tensor.is_meta else _shape_of(tensor))
        result = func(*shapes[0], **shapes[1])
        self._note(func, call_args, call_kwargs, result, written=written, read=empty)
        return result

    def _note(
        self,
        func: Operation,
        args: _Args,
        kwargs: _Options,
        result: object,
        *,
        written: Sequence[Tensor] = (),
        read: Sequence[Tensor] = (),
    ) -> None:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        call = _Call(function=func, args=args, kwargs=dict(kwargs), is_random=is_random)
        for key in dict.fromkeys(self._key(tensor) for tensor in written):
            self._logs.setdefault(key, []).append(_Entry(call=call))
        known = {self._key(tensor) for tensor in read}
        for number, tensor in enumerate(tensors_in(result)):
            key = self._key(tensor)
            # Begin a log of calls only for a new storage: a view shares its argument's storage, which has a log.
            if key not in known and tensor.is_meta:
                known.add(key)
                self._logs[key] = [_Entry(call=call, output=number, like=self._ref(tensor))]

    def _refs(self, values: _T, done: Mapping[int, int]) -> _T:
        # Clone a tensor that already has values, because the constructor may change the tensor later.
        def taken(tensor: Tensor) -> object:
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
        """Replay the tensor's operations. Return its values on the CPU.

        `name` and `seed` select the tensor's random numbers. `names` maps storage addresses to the names of all
        recorded tensors, because the operations may read other tensors.
        """
        return _Replay(self._logs, name, seed, names).view(self._ref(tensor, len(self._logs[self._key(tensor)])))


class _Replay:
    def __init__(self, logs: Mapping[int, list[_Entry]], name: str, seed: int, names: Mapping[int, str]) -> None:
        self._logs, self._name, self._seed, self._names = logs, name, seed, names
        self._states: dict[tuple[int, int], Tensor] = {}
        self._results: dict[int, list[Tensor]] = {}

    def view(self, ref: _Ref) -> Tensor:
        return self._state(ref).as_strided(ref.size, ref.stride, ref.offset)

    def _state(self, ref: _Ref) -> Tensor:
        if (known := self._states.get((ref.key, ref.done))) is not None:
            return known
        whose = self._names.get(ref.key) or f"{self._name} / {len(self._states)}"
        generator = torch.Generator().manual_seed(derive(f"initialise {whose}", self._seed))
        flat = torch.empty(_extent(ref), dtype=ref.dtype)
        for entry in self._logs[ref.key][: ref.done]:
            if entry.output is not None and (like := entry.like) is not None:
                # Copy the result into the recorded strides, because the CPU may return different strides, such as row-major ones.
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

    def _run(self, call: _Call, generator: torch.Generator, storage: Callable[[_Ref], Tensor]) -> object:
        def real(value: object) -> Any:
            match value:
                case _Ref():
                    return storage(value).as_strided(value.size, value.stride, value.offset)
                case torch.device():
                    return torch.device("cpu")
                case torch.Generator():
                    return None
                case list() | tuple() if not isinstance(value, torch.Size):
                    return type(value)(map(real, value))
            return value

        args, kwargs = real(tuple(call.args)), {key: real(value) for key, value in call.kwargs.items()}
        if not call.is_random:
            return call.function(*args, **kwargs)
        # Some random operations take no generator as argument, so seed torch's global generator, and restore its state.
        before = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            return call.function(*args, **kwargs)
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


def _extent(ref: _Ref) -> int:
    if 0 in ref.size:
        return 0
    return ref.offset + 1 + sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride, strict=True))


def _written(func: Operation, args: _Args, kwargs: _Options) -> list[Tensor]:
    arguments = enumerate(func._schema.arguments)
    values = (
        kwargs.get(argument.name, [*args[number : number + 1], None][0])
        for number, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return [tensor for value in values for tensor in tensors_in(value)]


def _shape_of(tensor: Tensor) -> Tensor:
    # Don't replace a 0-dim tensor: torch accepts it beside tensors of any device, and its value may determine the result's dtype.
    return tensor if tensor.dim() == 0 else torch.empty_like(tensor, device="meta")
