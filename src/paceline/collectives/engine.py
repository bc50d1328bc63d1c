"""The engine: named operations in any submission order, each done once every rank has submitted it."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from paceline.collectives import world
from paceline.collectives.errors import ArgumentError
from paceline.collectives.handle import Handle
from paceline.collectives.liveness import are_equally_many
from paceline.collectives.process_sets import ProcessSets
from paceline.collectives.request import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    CHANGE_SETS,
    JOIN,
    REDUCESCATTER,
    CollectiveTask,
    Request,
)
from paceline.collectives.settings import EngineSettings
from paceline.collectives.world import RankedWorld

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from paceline.collectives.numbers import Array, DType

_NUMBERS = "biufc"
DEVICE_ALLREDUCE = "device_allreduce"
OPERATIONS = ("sum", "average", "min", "max", "product", "adasum")
#: Name of a dtype that NumPy lacks, such as bfloat16, whose bits the arrays hold; or one such name for each array.
Dtype = str | Sequence[str | None] | None


class ReductionOptions(TypedDict, total=False):
    """Keyword arguments for reducing arrays over the ranks.

    `op` is one of `OPERATIONS`, by default "sum". `prescale` multiplies the arrays before the reduction, `postscale` after it.
    """

    op: str
    prescale: float
    postscale: float
    process_set: int
    dtype: Dtype


class Engine:
    """All collective operations of this process, made by `paceline.collectives.start`.

    Arrays are NumPy arrays. With `dtype="bfloat16"`, arrays of uint16 hold the bits of bfloat16. Do not touch an array
    until its operation is done. Kind and name identify an operation. The name may be used again once the operation is
    done. Process set 0 has all ranks. Only ranks of a process set may start operations in the set.
    """

    def __init__(self, joined: RankedWorld, settings: EngineSettings) -> None:
        transport = joined.transport
        self.rank, self.size = transport.rank, transport.size
        self.transport_name = joined.name
        here = joined.places[self.rank]
        self.settings = settings.chosen(here.local_size)
        #: Number of engines that this world had before this engine.
        self.generation = joined.generation
        self.local_rank, self.local_size = here.local_rank, here.local_size
        self.cross_rank, self.cross_size = here.cross_rank, here.cross_size
        #: Whether every machine has equally many ranks.
        self.is_homogeneous = are_equally_many(joined.places)
        self._sets = ProcessSets(joined, self.settings)
        #: How often all ranks have called `join`. Every rank counts at the same point in the order of operations.
        self.joins = 0
        self._barriers: dict[int, itertools.count[int]] = {}
        self._changes_lock = threading.Lock()
        self._set_changes = itertools.count()

    @property
    def is_used(self) -> bool:
        """Whether this rank has started any operation."""
        return self._sets.is_used

    def allreduce(
        self, name: str, array: Array, *, out: Array | None = None, **how: Unpack[ReductionOptions]
    ) -> Handle:
        """Start an all-reduce of `array`, into `out` if given.

        The operation "average" divides the sum by the number of ranks, and truncates integers towards 0. "adasum"
        requires floating-point arrays, and 2, 4, 8, ... ranks. float16 and bfloat16 are summed in float32.
        """
        return self._reduce(ALLREDUCE, name, [array], [out], **how)

    def grouped_allreduce(
        self,
        name: str,
        arrays: Sequence[Array],
        *,
        outs: Sequence[Array | None] | None = None,
        **how: Unpack[ReductionOptions],
    ) -> Handle:
        """Start an all-reduce of several arrays as one operation."""
        return self._reduce(ALLREDUCE, name, arrays, outs, grouped=True, **how)

    def reducescatter(self, name: str, array: Array, **how: Unpack[ReductionOptions]) -> Handle:
        """Start a reduce-scatter. The result is this rank's rows of the reduced array.

        If the rows cannot be divided equally, each of the first ranks gets one row more.
        """
        return self._reduce(REDUCESCATTER, name, [array], **how)

    def grouped_reducescatter(self, name: str, arrays: Sequence[Array], **how: Unpack[ReductionOptions]) -> Handle:
        """Start a reduce-scatter of several arrays."""
        return self._reduce(REDUCESCATTER, name, arrays, grouped=True, **how)

    def device_allreduce(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        *,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
    ) -> Handle:
        """Start an all-reduce of torch tensors on one GPU, by NCCL.

        `outs` may be `tensors`. The handle is done once this rank has started the reduction on the GPU. The handle's
        result is a function that makes the caller's CUDA stream wait until `outs` are filled. Ranks that called `join`
        cannot take part. "adasum" is not available.
        """
        is_member = self.rank in self._sets.members(process_set)
        if not is_member or op not in OPERATIONS or op == "adasum" or not tensors:
            raise ArgumentError(
                f"device_allreduce {name!r} of {len(tensors)} tensors with op={op!r} in set {process_set}."
            )
        loop = self._sets.loop(process_set)
        from paceline.collectives import device

        place = tensors[0].device
        ready = device.ready(place)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        request = Request(DEVICE_ALLREDUCE, name, dtypes, shapes, op, prescale, postscale, grouped=True)

        def begin(_: object) -> Callable[[], None]:
            group = self._sets.device_group(process_set, place)
            with device.translated(self.rank):
                done = group.allreduce(tensors, outs, op, prescale, postscale, ready)
            return lambda: group.let_wait(done)

        return loop.submit(CollectiveTask(request, [], [], Handle(request.key, loop.waiter), begin))

    def allgather(self, name: str, array: Array, *, process_set: int = 0) -> Handle:
        """Start an all-gather: concatenate the ranks' arrays along the first dimension."""
        _check_rows(ALLGATHER, name, [array])
        return self._submit(ALLGATHER, name, [array], process_set)

    def grouped_allgather(self, name: str, arrays: Sequence[Array], *, process_set: int = 0) -> Handle:
        """Start an all-gather of several arrays."""
        _check_rows(ALLGATHER, name, arrays)
        return self._submit(ALLGATHER, name, arrays, process_set, grouped=True)

    def broadcast(
        self, name: str, array: Array, *, root: int, process_set: int = 0, out: Array | None = None
    ) -> Handle:
        """Start a broadcast from world rank `root`, into `out` if given."""
        members = self._sets.members(process_set)
        if root not in members:
            raise ArgumentError(
                f"root={root} is not a rank of process set {process_set}, which has {list(members)}. Name one of them."
            )
        return self._submit(BROADCAST, name, [array], process_set, outs=[out], root=members.index(root))

    def alltoall(self, name: str, array: Array, *, splits: Sequence[int] | None = None, process_set: int = 0) -> Handle:
        """Start an all-to-all exchange of rows.

        The result is a pair: the received rows, and the number of rows from each rank. `splits` has the number of rows
        to send to each rank, by default equal parts. Rows of `array` beyond the sum of `splits` are not sent.
        """
        _check_rows(ALLTOALL, name, [array])
        size, rows = len(self._sets.members(process_set)), array.shape[0]
        if splits is None:
            if rows % size:
                raise ArgumentError(f"alltoall {name!r} of {rows} rows to {size} ranks needs splits.")
            splits = [rows // size] * size
        splits = tuple(int(count) for count in splits)
        if len(splits) != size or min(splits) < 0 or sum(splits) > rows:
            raise ArgumentError(
                f"alltoall {name!r} got splits={list(splits)}: give one number from 0 on for each of {size} ranks, "
                f"in all at most the {rows} rows of the array."
            )
        return self._submit(ALLTOALL, name, [array], process_set, splits=splits)

    def barrier(self, process_set: int = 0) -> Handle:
        """Start a barrier. Between two calls of `join`, every rank must start equally many barriers."""
        number = next(self._barriers.setdefault(process_set, itertools.count()))
        name = f"barrier.{self.counted(process_set, number)}"
        return self._submit(BARRIER, name, [], process_set, finish=lambda _: None)

    def join(self) -> Handle:
        """Contribute zeros to the other ranks' operations until every rank has joined.

        The handle's result is the rank that joined last. Then the numbers that name unnamed operations restart at 0,
        because ranks that joined early have counted fewer operations.
        """
        return self._submit(JOIN, JOIN, [], 0, finish=self._joined)

    def counted(self, process_set: int, number: int) -> str:
        """Return a unique name for the unnamed operation with this number."""
        return f"{self.joins}.{number}" if self.joins and process_set == 0 else str(number)

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Create a process set of these ranks.

        Return its number. Every rank of the world calls this with the same ranks.

        Raises:
            ArgumentError: A rank is unknown or named twice, or a process set of these ranks exists.
            MismatchError: The ranks named different sets, or another rank removes a set at the same time.
        """
        members = tuple(sorted(int(rank) for rank in ranks))
        # Submit even an invalid request: other ranks may have submitted a valid one, and would wait for this rank forever.
        return int(self._change_sets("add", members, lambda _: self._sets.make(members)).wait())

    def remove_process_set(self, number: int) -> bool:
        """Remove a process set.

        Return whether it existed. Every rank of the world calls this. Process set 0 cannot be removed.

        Raises:
            MismatchError: The ranks named different sets, or another rank adds a set at the same time.
        """
        if number == 0:
            return False
        return bool(self._change_sets("remove", (number,), lambda _: self._sets.drop(number)).wait())

    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each process set, by number."""
        return dict(self._sets.ranks)

    def observe(self, callback: Callable[..., object], *, arrivals: bool = False) -> None:
        """Call `callback` after each operation of any process set.

        The arguments are (request, submitted_s, agreed_s, done_s), with times of `time.monotonic`. `agreed_s` is None
        if the ranks disagreed. The calls have the same order on all ranks. A callback must be quick, because it runs in
        the thread that performs the operations. With `arrivals` the callback gets a fifth argument: on the set's first
        rank a sequence with (rank, time) of each rank's request, on other ranks an empty sequence.
        """
        self._sets.observe(callback, arrivals=arrivals)

    def ignore(self, callback: Callable[..., object]) -> None:
        """Remove a callback of `observe`, if it is registered."""
        self._sets.ignore(callback)

    def _reduce(
        self,
        kind: str,
        name: str,
        arrays: Sequence[Array],
        outs: Sequence[Array | None] | None = None,
        *,
        grouped: bool = False,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        dtype: Dtype = None,
    ) -> Handle:
        if op not in OPERATIONS:
            raise ArgumentError(f"op={op!r} is unknown. The operations are {', '.join(OPERATIONS)}.")
        if any(array.dtype.kind not in _NUMBERS for array in arrays):
            raise ArgumentError(f"arrays of {', '.join(str(a.dtype) for a in arrays)} can't be reduced: give numbers.")
        if op in ("min", "max") and any(array.dtype.kind == "c" for array in arrays):
            raise ArgumentError(f"op={op!r} of complex numbers: they have no order. Reduce real and imaginary part.")
        dtypes = [dtype] * len(arrays) if dtype is None or isinstance(dtype, str) else dtype
        if op == "adasum":
            if kind == REDUCESCATTER:
                raise ArgumentError(f"reducescatter {name!r} can't be done with op='adasum'. Choose another operation.")
            size = len(self._sets.members(process_set))
            if size & (size - 1):
                raise ArgumentError(f"op='adasum' needs a power of two of ranks, and there are {size}.")
            names = [name or array.dtype.name for name, array in zip(dtypes, arrays, strict=True)]
            if not set(names) <= {"float16", "bfloat16", "float32", "float64"}:
                raise ArgumentError("op='adasum' is for floating-point arrays.")
        if kind == REDUCESCATTER:
            _check_rows(kind, name, arrays)
        return self._submit(kind, name, arrays, process_set, outs, dtypes, op, prescale, postscale, grouped=grouped)

    def _submit(
        self,
        kind: str,
        name: str,
        arrays: Sequence[Array],
        process_set: int,
        outs: Sequence[Array | None] | None = None,
        dtypes: Sequence[str | None] | None = None,
        op: str = "",
        prescale: float = 1.0,
        postscale: float = 1.0,
        *,
        finish: Callable[[Any], object] | None = None,
        grouped: bool = False,
        root: int = -1,
        splits: tuple[int, ...] = (),
    ) -> Handle:
        loop = self._sets.loop(process_set)
        if grouped and not arrays:
            raise ArgumentError(f"grouped {kind} {name!r} got no arrays. Give at least one.")
        none = (None,) * len(arrays)
        targets = none if outs is None else tuple(outs)
        ready, names, shapes, scattered = [], [], [], False
        # A step submits hundreds of arrays, so do all the work in a single loop with few calls.
        for array, out, dtype in zip(arrays, targets, dtypes or none, strict=True):
            if out is not None and out is not array and (out.shape != array.shape or out.dtype != array.dtype):
                raise ArgumentError(
                    f"out of {kind} {name!r} has {out.dtype}{list(out.shape)}, the array "
                    f"{array.dtype}{list(array.shape)}. Give one of the same type and shape."
                )
            plain = array if array.flags.c_contiguous else array.copy(order="C")
            if out is not None and out is not plain and not out.flags.c_contiguous:
                scattered = True
            ready.append(plain)
            names.append(dtype or _dtype_name(array.dtype))
            shapes.append(array.shape)
        if scattered:
            finish = _copy_back(targets, grouped)
            targets = tuple([None if out is None else out.copy(order="C") for out in targets])
        request = loop.known((kind, name, tuple(names), tuple(shapes), op, prescale, postscale, root, splits, grouped))
        # Use tuples instead of lists: the garbage collector does not track a tuple that holds only arrays.
        return loop.submit(CollectiveTask(request, tuple(ready), targets, Handle(request.key, loop.waiter), finish))

    def _joined(self, last: int) -> int:
        self.joins += 1
        self._barriers.pop(0, None)
        self._set_changes = itertools.count()
        return last

    def _change_sets(self, op: str, ranks: tuple[int, ...], finish: Callable[[Any], object]) -> Handle:
        # Name each change by a counter. If ranks request different changes, the requests meet under one name and fail. The lock
        # makes threads submit changes in the order of the counter.
        with self._changes_lock:
            name = f"change.{self.counted(0, next(self._set_changes))}"
            return self._submit(CHANGE_SETS, name, [], 0, op=op, splits=ranks, finish=finish)


_lock = threading.Lock()
_engine: Engine | None = None


def start(settings: EngineSettings | None = None) -> Engine:
    """Return this process's engine.

    Start the engine first if needed. Every rank of the run must call `start`.

    Raises:
        CollectivesError: There is no transport, the ranks cannot reach each other, or a rank has died.
        ArgumentError: A HOROVOD_* setting has an invalid value.
    """
    global _engine
    # Hold the lock until all ranks have met, which may take minutes. Another caller then gets the same engine.
    with _lock:
        if _engine is None:
            settings = settings or EngineSettings.from_environment()
            joined = world.join(os.environ)
            # At exit, `stop` must run before the function that finalizes MPI, which `join` registers. atexit runs the last
            # registered function first, so register `stop` after `join`, even if an earlier engine has registered it.
            atexit.unregister(stop)
            atexit.register(stop)
            _engine = Engine(joined, settings)
        return _engine


def _forget() -> None:
    # A forked child has no thread of the engine, and must not use the engine's connections or MPI.
    global _engine, _lock
    # At the fork, another thread may have held the lock. The child lacks this thread, so create a new lock.
    _lock = threading.Lock()
    if _engine is not None:
        _engine._sets.forsake()
    _engine = None


os.register_at_fork(after_in_child=_forget)


def current() -> Engine | None:
    """Return the running engine of this process, or None."""
    return _engine


def stop() -> None:
    """Shut the engine down on all ranks.

    Operations in flight fail. Afterwards `start` may be called again.
    """
    global _engine
    with _lock:
        engine, _engine = _engine, None
    if engine is not None:
        engine._sets.stop()


@functools.cache
def _dtype_name(dtype: DType) -> str:
    # Cache the name, because NumPy builds it at each access.
    return str(dtype.name)


def _check_rows(kind: str, name: str, arrays: Sequence[Array]) -> None:
    if any(array.ndim == 0 for array in arrays):
        raise ArgumentError(f"{kind} {name!r} got a 0-dimensional array, which has no rows. Give it one dimension.")


def _copy_back(targets: Sequence[Array | None], grouped: bool) -> Callable[[Any], object]:
    """Return a function that copies a result, or several if `grouped`, into `targets`."""

    def copied(result: Array, target: Array | None) -> Array:
        if target is None:
            return result
        target[...] = result
        return target

    def finish(results: Any) -> object:
        if not grouped:
            return copied(results, targets[0])
        return [copied(result, target) for result, target in zip(results, targets, strict=True)]

    return finish
