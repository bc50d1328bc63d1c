"""The engine: named operations in any submission order, each done once every rank has submitted it."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from paceline.collectives import world
from paceline.collectives.background_loop import BackgroundLoop
from paceline.collectives.errors import ArgumentError, ShutDownError
from paceline.collectives.handle import Handle
from paceline.collectives.liveness import PeerWatch, are_equally_many
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
from paceline.collectives.transport import Transport
from paceline.collectives.world import RankedWorld

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paceline.collectives.numbers import Array

_DYING_S, _LET_GO_S = 0.3, 3.0
_NUMBERS = "biufc"
DEVICE_ALLREDUCE = "device_allreduce"
OPERATIONS = ("sum", "average", "min", "max", "product", "adasum")
#: Of arrays that hold another type than NumPy says: of all of them, or of each.
Dtype = str | Sequence[str | None] | None


class ReductionOptions(TypedDict, total=False):
    """Keyword arguments of the reductions.

    `op` is one of `OPERATIONS`, by default "sum". Arrays are multiplied by `prescale` before, and by `postscale` after it.
    """

    op: str
    prescale: float
    postscale: float
    process_set: int
    dtype: Dtype


class _Observer(NamedTuple):
    """A callback after each operation, and whether it also wants the arrival times."""

    callback: Callable[..., object]
    arrivals: bool


class Engine:
    """All collective operations of this process, made by `paceline.collectives.start`.

    Arrays are NumPy arrays. With `dtype="bfloat16"`, arrays of uint16 hold the bits of bfloat16. Do not touch an array until its
    operation is done. An operation is identified by its kind and name; the name is free again once the operation is done.
    Process set 0 holds all ranks. Only the ranks of a process set call its operations.
    """

    def __init__(self, joined: RankedWorld, settings: EngineSettings) -> None:
        transport = joined.transport
        self.rank: int = transport.rank if transport is not None else 0
        self.size: int = transport.size if transport is not None else 1
        self.transport_name = joined.name
        here = joined.places[self.rank]
        self.settings = settings.chosen(here.local_size)
        self.local_rank, self.local_size = here.local_rank, here.local_size
        self.cross_rank, self.cross_size = here.cross_rank, here.cross_size
        #: Whether every machine has equally many ranks.
        self.is_homogeneous = are_equally_many(joined.places)
        self._world = joined
        self._lock = threading.Lock()
        self._observers: list[_Observer] = []
        #: Number of completed joins: it changes at the same point of the operation order on every rank.
        self.joins = 0
        self._barriers: dict[int, itertools.count[int]] = {}
        self._set_numbers = itertools.count(1)
        self._set_changes = itertools.count()
        self._device_groups: dict[int, Any] = {}
        self._sets: dict[int, tuple[int, ...]] = {0: tuple(range(self.size))}
        #: Why the engine has failed, once it has.
        self._failure: str | None = None
        self._loops: dict[int, BackgroundLoop] = {}
        self._loops[0] = self._new_loop(transport, self._sets[0], 0)
        watched = {} if transport is None else transport.watched()
        self._peer_watch = PeerWatch(joined.places, self.rank, self._peer_lost, self._watch, watched)

    # Reductions.

    def allreduce(
        self, name: str, array: Array, *, out: Array | None = None, **how: Unpack[ReductionOptions]
    ) -> Handle:
        """Start an all-reduce of `array`, into `out` if given (which may be `array` itself).

        "average" divides the sum by the number of ranks and truncates integers towards 0. float16 and bfloat16 are summed in
        float32. "adasum" takes floating-point arrays and a power of two of ranks.
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
        """Start an all-reduce of several arrays, which begins when all of them are ready on all ranks."""
        return self._reduce(ALLREDUCE, name, arrays, outs, grouped=True, **how)

    def reducescatter(self, name: str, array: Array, **how: Unpack[ReductionOptions]) -> Handle:
        """Start a reduce-scatter; the result is this rank's rows. The first ranks get the rows left over."""
        return self._reduce(REDUCESCATTER, name, [array], **how)

    def grouped_reducescatter(self, name: str, arrays: Sequence[Array], **how: Unpack[ReductionOptions]) -> Handle:
        """Start a reduce-scatter of several arrays; the result is the list of this rank's rows."""
        return self._reduce(REDUCESCATTER, name, arrays, grouped=True, **how)

    def device_allreduce(
        self,
        name: str,
        tensors: Sequence[Any],
        outs: Sequence[Any],
        *,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
    ) -> Handle:
        """Start an all-reduce of torch tensors on one GPU by NCCL; an out may be its own tensor.

        The handle is done as soon as every rank has begun. Its result is a function that makes the caller's CUDA stream wait
        until the outs are filled. Ranks that have joined cannot take part, and "adasum" is not available.
        """
        self._members(process_set)
        loop = self._loops.get(process_set)
        if loop is None or op not in OPERATIONS or op == "adasum" or not tensors:
            raise ArgumentError(
                f"device_allreduce {name!r} of {len(tensors)} tensors with op={op!r} in set {process_set}."
            )
        from paceline.collectives import device

        place = tensors[0].device
        ready = device.ready(place)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        request = Request(DEVICE_ALLREDUCE, name, dtypes, shapes, op, prescale, postscale, grouped=True)

        def begin(_: Any) -> Callable[[], None]:
            group = self._device_group(process_set, place)
            with device.translated(self.rank):
                done = group.allreduce(tensors, outs, op, prescale, postscale, ready)
            return lambda: group.let_wait(done)

        return loop.submit(CollectiveTask(request, [], [], Handle(request.key, loop.waiter), begin))

    # Movements.

    def allgather(self, name: str, array: Array, *, process_set: int = 0) -> Handle:
        """Start a concatenation of the ranks' arrays along the first dimension, which may differ."""
        _check_rows(ALLGATHER, name, [array])
        return self._submit(ALLGATHER, name, [array], process_set)

    def grouped_allgather(self, name: str, arrays: Sequence[Array], *, process_set: int = 0) -> Handle:
        """Start an all-gather of several arrays; the result is the list of gathered arrays."""
        _check_rows(ALLGATHER, name, arrays)
        return self._submit(ALLGATHER, name, arrays, process_set, grouped=True)

    def broadcast(
        self, name: str, array: Array, *, root: int, process_set: int = 0, out: Array | None = None
    ) -> Handle:
        """Start a broadcast from world rank `root`, into `out` if given (which may be `array`)."""
        members = self._members(process_set)
        if root not in members:
            raise ArgumentError(
                f"root={root} is no rank of process set {process_set}, which has {list(members)}. Name one of them."
            )
        return self._submit(BROADCAST, name, [array], process_set, outs=[out], root=members.index(root))

    def alltoall(self, name: str, array: Array, *, splits: Sequence[int] | None = None, process_set: int = 0) -> Handle:
        """Start an exchange of rows; the result is the received rows and the count from each rank.

        `splits` holds the number of rows for each rank, and defaults to equal parts. Rows beyond its sum are not sent.
        """
        _check_rows(ALLTOALL, name, [array])
        size, rows = len(self._members(process_set)), array.shape[0]
        if splits is None:
            if rows % size:
                raise ArgumentError(
                    f"alltoall {name!r} of {rows} rows to {size} ranks needs splits: it doesn't divide."
                )
            splits = [rows // size] * size
        splits = tuple(int(count) for count in splits)
        if len(splits) != size or min(splits) < 0 or sum(splits) > rows:
            raise ArgumentError(
                f"alltoall {name!r} got splits={list(splits)}: give one number from 0 on for each of {size} ranks, "
                f"in all at most the {rows} rows of the array."
            )
        return self._submit(ALLTOALL, name, [array], process_set, splits=splits)

    # Agreement alone.

    def barrier(self, process_set: int = 0) -> Handle:
        """Start a barrier. Between two joins, every rank must call it equally often."""
        number = next(self._barriers.setdefault(process_set, itertools.count()))
        name = f"barrier.{self.counted(process_set, number)}"
        return self._submit(BARRIER, name, [], process_set, finish=lambda _: None)

    def join(self) -> Handle:
        """Contribute zeros until every rank has joined; the result is the last rank to join.

        Counters of unnamed operations restart at 0 afterwards, because ranks that joined early have counted less.
        """
        return self._submit(JOIN, JOIN, [], 0, finish=self._joined)

    def counted(self, process_set: int, number: int) -> str:
        """Return a name for an unnamed operation, unique across all joins of the world."""
        return f"{self.joins}.{number}" if self.joins and process_set == 0 else str(number)

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Create a process set and return its number. Every rank of the world calls it with the same ranks.

        Raises:
            ArgumentError: A rank is unknown or named twice, or these ranks form a process set already.
            MismatchError: Ranks named different sets, or one of them removes a set at the same time.
        """
        members = tuple(sorted(int(rank) for rank in ranks))
        # Submit even an invalid request: the other ranks may have submitted another one, and would wait for this rank.
        handle = self._change_sets("add", members, lambda _: self._make_set(members))
        return int(handle.wait())

    def remove_process_set(self, number: int) -> bool:
        """Remove a process set and return whether it existed. Every rank of the world calls it.

        Process set 0 cannot be removed.

        Raises:
            MismatchError: Ranks named different sets, or one of them adds a set at the same time.
        """
        if number == 0:
            return False
        return bool(self._change_sets("remove", (number,), lambda _: self._drop_set(number)).wait())

    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each process set by number; number 0 holds all ranks."""
        return dict(self._sets)

    def observe(self, callback: Callable[..., object], *, arrivals: bool = False) -> None:
        """Call `callback(request, submitted_s, agreed_s, done_s)` after each operation of any process set.

        The thread that performs a set's operations calls it, in the same order on all ranks, so it must be quick. Times come from
        `time.monotonic`. `agreed_s` is None where the ranks disagreed. With `arrivals` the callback gets a fifth value: (rank,
        time) of each rank's request, known only to the first rank of a process set and empty elsewhere.
        """
        self._observers.append(_Observer(callback, arrivals))
        for loop in list(self._loops.values()):
            self._let_observe(loop)

    def ignore(self, callback: Callable[..., object]) -> None:
        """Remove an observer; do nothing if it is unknown."""
        self._observers = [known for known in self._observers if known.callback != callback]
        for loop in list(self._loops.values()):
            self._let_observe(loop)

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
        for array in arrays:
            if array.dtype.kind not in _NUMBERS:
                raise ArgumentError(
                    f"arrays of {', '.join(str(a.dtype) for a in arrays)} can't be reduced: give numbers."
                )
        if op in ("min", "max") and any(array.dtype.kind == "c" for array in arrays):
            raise ArgumentError(f"op={op!r} of complex numbers: they have no order. Reduce real and imaginary part.")
        told = [dtype] * len(arrays) if dtype is None or isinstance(dtype, str) else dtype
        if op == "adasum":
            if kind == REDUCESCATTER:
                raise ArgumentError(f"reducescatter {name!r} can't be done with op='adasum'. Choose another operation.")
            size = len(self._members(process_set))
            if size & (size - 1):
                raise ArgumentError(f"op='adasum' needs a power of two of ranks, and there are {size}.")
            names = [name or array.dtype.name for name, array in zip(told, arrays, strict=True)]
            if not set(names) <= {"float16", "bfloat16", "float32", "float64"}:
                raise ArgumentError("op='adasum' is for floating-point arrays.")
        if kind == REDUCESCATTER:
            _check_rows(kind, name, arrays)
        return self._submit(kind, name, arrays, process_set, outs, told, op, prescale, postscale, grouped=grouped)

    def _submit(
        self,
        kind: str,
        name: str,
        arrays: Sequence[Array],
        process_set: int,
        outs: Sequence[Array | None] | None = None,
        told: Sequence[str | None] | None = None,
        op: str = "",
        prescale: float = 1.0,
        postscale: float = 1.0,
        *,
        finish: Callable[[Any], Any] | None = None,
        grouped: bool = False,
        root: int = -1,
        splits: tuple[int, ...] = (),
    ) -> Handle:
        loop = self._loops.get(process_set)
        if loop is None:
            raise ArgumentError(
                f"rank {self.rank} is not a member of process set {process_set}: {list(self._members(process_set))}."
            )
        if grouped and not arrays:
            raise ArgumentError(f"grouped {kind} {name!r} got no arrays. Give at least one.")
        none = (None,) * len(arrays)
        given = none if outs is None else tuple(outs)
        ready, dtypes, shapes, scattered = [], [], [], False
        # One loop, and few calls in it: a step submits hundreds.
        for array, out, named in zip(arrays, given, told or none, strict=True):
            if out is not None and out is not array and (out.shape != array.shape or out.dtype != array.dtype):
                raise ArgumentError(
                    f"out of {kind} {name!r} has {out.dtype}{list(out.shape)}, the array "
                    f"{array.dtype}{list(array.shape)}. Give one of the same type and shape."
                )
            plain = array if array.flags.c_contiguous else array.copy(order="C")
            if out is not None and out is not plain and not out.flags.c_contiguous:
                scattered = True
            ready.append(plain)
            dtypes.append(named or _dtype_name(array.dtype))
            shapes.append(array.shape)
        if scattered:
            finish = _copy_back(given, grouped)
            given = tuple([None if out is None else out.copy(order="C") for out in given])
        request = loop.known((kind, name, tuple(dtypes), tuple(shapes), op, prescale, postscale, root, splits, grouped))
        # Tuples: those of arrays alone the garbage collector soon leaves out.
        return loop.submit(CollectiveTask(request, tuple(ready), given, Handle(request.key, loop.waiter), finish))

    def _members(self, process_set: int) -> tuple[int, ...]:
        if process_set not in self._sets:
            raise ArgumentError(f"there is no process set {process_set}; there are {sorted(self._sets)}.")
        return self._sets[process_set]

    def _device_group(self, process_set: int, place: Any) -> Any:
        """Return the set's NCCL group, made by the first operation, which all its ranks begin in the same order."""
        from paceline.collectives import device

        if process_set not in self._device_groups:
            members = self._sets[process_set]
            made = device.join(os.environ, self._world.generation, process_set, members, self.rank, place)
            self._device_groups[process_set] = made
        return self._device_groups[process_set]

    def _joined(self, last: int) -> int:
        self.joins += 1
        self._barriers.pop(0, None)
        self._set_changes = itertools.count()
        return last

    # Process sets; both are run in the world's thread, in the same order on all ranks.

    def _change_sets(self, op: str, ranks: tuple[int, ...], finish: Callable[[Any], Any]) -> Handle:
        # The name is the position among all changes, so ranks with different requests still meet and get an error. The lock
        # keeps the number and the submission together when several threads change sets.
        with self._lock:
            name = f"change.{self.counted(0, next(self._set_changes))}"
            return self._submit(CHANGE_SETS, name, [], 0, op=op, splits=ranks, finish=finish)

    def _make_set(self, members: tuple[int, ...]) -> int:
        if not members or len(set(members)) < len(members) or members[0] < 0 or members[-1] >= self.size:
            raise ArgumentError(
                f"a process set of ranks {list(members)}: name each rank once, from 0 to {self.size - 1}, and at least "
                "one."
            )
        same = [number for number, others in self._sets.items() if others == members]
        if same:
            raise ArgumentError(f"ranks {list(members)} are process set {same[0]} already. Use that one.")
        # The same number on every rank, and the split in the same place of the world's order: this is called in the turn of
        # the world's loop, so nothing else uses its transport meanwhile.
        number = next(self._set_numbers)
        world = self._loops[0].transport
        transport = world.split(members, number) if world is not None and len(members) > 1 else None
        self._sets[number] = members
        if self.rank in members:
            self._loops[number] = self._new_loop(transport, members, number)
            # `_lost`, in another thread, notes the failure first and then goes through the loops: it saw this one, or is
            # seen here.
            if self._failure is not None:
                self._fail(self._loops[number], self._failure)
        return number

    def _drop_set(self, number: int) -> bool:
        if number not in self._sets:
            return False
        loop = self._loops.pop(number, None)
        del self._sets[number]
        if loop is not None:
            loop.leave()
            loop.join()
        if (group := self._device_groups.pop(number, None)) is not None:
            group.close(broken=False)
        return True

    def _new_loop(self, transport: Transport | None, members: tuple[int, ...], number: int) -> BackgroundLoop:
        loop = BackgroundLoop(transport, members, number, self.settings, self._lost)
        self._let_observe(loop)
        return loop

    def _let_observe(self, loop: BackgroundLoop) -> None:
        """Pass the observers on to the loop, or None when there are none, which saves time."""
        observers = list(self._observers)

        def observed(request: Request, *values: Any) -> None:
            for one in observers:
                one.callback(request, *(values if one.arrivals else values[:3]))

        loop.observer = observed if observers else None
        if any(one.arrivals for one in observers):
            loop.note_arrivals()

    # The end.

    def _peer_lost(self, rank: int, reason: str) -> None:
        # Once all have heard the end, each goes when it likes.
        if not self._loops[0].has_heard_end:
            self._lost(reason, rank)

    def _lost(self, reason: str, lost_rank: int = -1) -> None:
        """Fail the operations in flight of all process sets.

        Any thread may call it. It must hold no lock except a loop's _claim.
        """
        self._failure = self._failure or reason
        # The others may go because of the first.
        if lost_rank >= 0 and not self._world.lost_ranks:
            self._world.lost_ranks.add(lost_rank)
        for loop in list(self._loops.values()):
            self._fail(loop, reason)

    @staticmethod
    def _fail(loop: BackgroundLoop, reason: str) -> None:
        loop.fail(ShutDownError(f"{reason}. Nothing in flight can be completed; see that rank's log for the cause."))
        if loop.transport is not None:
            # After `fail`: a waiting caller gets the reason, not the transport's error.
            loop.transport.abandon(reason)

    def _watch(self) -> None:
        """Fail operations past the time limit. The thread that watches the ranks calls it once a second."""
        limit_s = self.settings.stall_shutdown_s
        if limit_s and self._failure is None:
            for loop in list(self._loops.values()):
                what = loop.overdue(limit_s)
                if what is not None:
                    self._lost(f"{what} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={limit_s:g})")
                    return

    def _forsake(self) -> None:
        error = ShutDownError(
            f"process {os.getpid()} was forked from rank {self.rank}, which alone can take part in its operations. "
            "Let a DataLoader's workers, and what multiprocessing starts, leave them to the process that started it."
        )
        for loop in self._loops.values():
            loop.forsake(error)

    def _stop(self) -> None:
        if self._failure is not None and not self._world.lost_ranks:
            # A process that dies closes its connections some time before the kernel says that it is gone.
            time.sleep(_DYING_S)
        # First: from now on other ranks may end as they like.
        self._peer_watch.close()
        loops = [self._loops[number] for number in sorted(self._loops, reverse=True)]
        if self._failure is not None:
            if self.transport_name == world.GLOO:
                # Those in the middle of something end when the others let go, and must not outlive the interpreter:
                # a thread of Gloo's that gives back its tensor then aborts the process.
                for loop in loops:
                    loop.join(_LET_GO_S)
            # Over MPI a thread may be stuck in a call that never returns. It is a daemon, and MPI is not finalised.
            self._close_device_groups(broken=True)
            return
        # Let all of them leave before joining the first, so that the sets end in parallel.
        for loop in loops:
            loop.leave()
        ended = [loop.join() for loop in loops]
        for loop, has_ended in zip(loops, ended, strict=True):
            if not has_ended and loop.transport is not None:
                loop.transport.abandon("another rank has not heard that this one shuts down")
        self._close_device_groups(broken=not all(ended))

    def _close_device_groups(self, *, broken: bool) -> None:
        for group in self._device_groups.values():
            group.close(broken=broken)
        self._device_groups.clear()


_lock = threading.Lock()
_engine: Engine | None = None


def start(settings: EngineSettings | None = None) -> Engine:
    """Return this process's engine, starting it if needed. Every rank of the run must call it.

    Raises:
        CollectivesError: There is no transport, the ranks cannot meet, or one of them has died before.
        ArgumentError: A HOROVOD_* setting has an invalid value.
    """
    global _engine
    # Held while the ranks meet, which may take minutes: another caller gets the same engine.
    with _lock:
        if _engine is None:
            settings = settings or EngineSettings.from_environment()
            joined = world.join(os.environ)
            # `atexit` runs in reverse order, and `join` has registered MPI's finalization: so this runs before it. Register
            # again, because an earlier engine may have registered before that.
            atexit.unregister(stop)
            atexit.register(stop)
            _engine = Engine(joined, settings)
        return _engine


def _forget() -> None:
    """Drop the engine in a forked child, which has none of its threads and must not use its connections or MPI."""
    global _engine, _lock
    # Another thread may have held the lock when the process was forked, and is not there to give it back.
    _lock = threading.Lock()
    if _engine is not None:
        _engine._forsake()
    _engine = None


os.register_at_fork(after_in_child=_forget)


def current() -> Engine | None:
    """Return the engine of this process, or None unless it is running."""
    return _engine


def stop() -> None:
    """Shut the engine down on all ranks; operations in flight fail. All ranks may call `start` again."""
    global _engine
    with _lock:
        engine, _engine = _engine, None
    if engine is not None:
        engine._stop()


@functools.cache
def _dtype_name(dtype: Any) -> str:
    # NumPy puts it together each time.
    return str(dtype.name)


def _check_rows(kind: str, name: str, arrays: Sequence[Array]) -> None:
    if any(array.ndim == 0 for array in arrays):
        raise ArgumentError(f"{kind} {name!r} got a 0-dimensional array, which has no rows. Give it one dimension.")


def _copy_back(targets: Sequence[Array | None], grouped: bool) -> Callable[[Any], Any]:
    """Return a `finish` that copies the results into outputs with gaps in their memory."""

    def finish(results: Any) -> Any:
        for target, result in zip(targets, results if grouped else [results], strict=True):
            if target is not None:
                target[...] = result
        kept = [r if t is None else t for t, r in zip(targets, results if grouped else [results], strict=True)]
        return kept if grouped else kept[0]

    return finish
