"""The process group that `init_process_group("mpi")` creates. Importing this module loads torch and mpi4py."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import weakref
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import torch
from mpi4py import MPI
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from paceline.collectives import mpi
from paceline.collectives.errors import CollectivesError
from paceline.system.collective_state import ranks_text
from paceline.torch_mpi import calls
from paceline.torch_mpi.comm_thread import Call, Lane
from paceline.torch_mpi.messages import Messages
from paceline.torch_mpi.work import DoneWork, MpiWork

Tensor = torch.Tensor
Tensors: TypeAlias = "list[Tensor]"


class _Options(Protocol):
    asyncOp: bool  # noqa: N815 - torch's name
    timeout: timedelta


def create(ranks: list[int], timeout_s: float) -> MpiProcessGroup | None:
    """Create the group of these world ranks. Return None on non-member ranks."""
    # As in torch, an empty list means all ranks. Every rank of the group has to call this function.
    world = mpi.world()
    # Install the hooks for a failing script before the early return: a rank outside of the group may fail, too.
    _leave_well()
    if ranks and world.rank not in ranks:
        return None
    if not ranks or ranks == list(range(world.size)):
        # Pass COMM_WORLD itself: the group's communication thread duplicates the communicator.
        return MpiProcessGroup(world, timeout_s, list(range(world.size)))
    if max(ranks) >= world.size:
        raise CollectivesError(f"a process group of ranks {ranks}, but MPI's world has {world.size} processes.")
    members = world.group.Incl(ranks)
    comm = world.Create_group(members)
    members.Free()
    group = MpiProcessGroup(comm, timeout_s, ranks)
    comm.Free()
    return group


#: Text with the ranks of a group, such as "0-3" -> counter that numbers the groups of these ranks.
_numbers: dict[str, itertools.count[int]] = {}
#: Use `Any`, because torch's type stubs lack one of the two constructors, and methods that a subclass may override.
_ProcessGroup: Any = ProcessGroup


class MpiProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A `torch.distributed` process group over MPI, for tensors in CPU memory.

    Collectives run on a communication thread (`comm_thread`), point-to-point messages on other threads. torch calls the
    methods, whose names differ between releases (`torch_private`). Each method returns a `Work`.
    """

    def __init__(self, comm: MPI.Intracomm, timeout_s: float, ranks: list[int] | None = None) -> None:
        super().__init__(comm.rank, comm.size)
        # Number the groups that have the same ranks. Ranks agree on the numbers, since all ranks create groups in the same order.
        text = "" if ranks is None else ranks_text(ranks)
        self._lane = Lane(comm, timeout_s, f"mpi {text}#{next(_numbers.setdefault(text, itertools.count()))}", text)
        self._messages = Messages(self._lane)
        self._is_shut_down = False
        self._group_name = ""
        self._group_desc = "undefined"
        _GROUPS.add(self)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"no backend for tensors on {device}: the backend 'mpi' is for tensors on the CPU.")
        return self

    # torch stores a group's name in a C++ backend, which this group does not have. C++ code calls getGroupName and getGroupDesc.

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks for
        return "mpi"

    def name(self) -> str:
        return "mpi"

    def set_timeout(self, timeout: timedelta) -> None:
        self._lane.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def allreduce(
        self,
        tensors: Tensor | Tensors,
        opts: AllreduceOptions | ReduceOp | None = None,
        *,
        op: ReduceOp | None = None,
        timeout: timedelta | None = None,
    ) -> MpiWork:
        opts = _reducing(opts, op, timeout)
        return self._start(calls.all_reduce(_several(tensors), opts.reduceOp, self.size()), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceOptions | None = None) -> MpiWork:
        opts = opts or AllreduceOptions()
        return self._start(calls.all_reduce(tensors, opts.reduceOp, self.size()), opts)

    def reduce(self, tensors: Tensors, opts: ReduceOptions | None = None) -> MpiWork:
        opts = opts or ReduceOptions()
        return self._start(
            calls.reduce(tensors, opts.reduceOp, self._member(opts.rootRank, "reduce"), self.size()), opts
        )

    def broadcast(
        self, tensors: Tensor | Tensors, opts: BroadcastOptions | int | None = None, *, root: int = 0
    ) -> MpiWork:
        if isinstance(opts, int):
            root, opts = opts, None
        root = self._member(root if opts is None else opts.rootRank, "broadcast")
        return self._start(calls.broadcast(_several(tensors), root), opts)

    def allgather(self, outputs: list[Tensors], tensors: Tensors, opts: _Options | None = None) -> MpiWork:
        return self._start(
            calls.all_gather(calls.only(outputs, "all_gather"), calls.only(tensors, "all_gather"), self.size()), opts
        )

    def allgather_coalesced(self, outputs: list[Tensors], tensors: Tensors, opts: _Options | None = None) -> MpiWork:
        """Gather several tensors: `outputs[rank][index]` gets tensor `index` of a rank."""
        each = [
            calls.all_gather([of_rank[index] for of_rank in outputs], tensor, self.size())
            for index, tensor in enumerate(tensors)
        ]
        return self._start(_together(each, outputs), opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: _Options | None = None) -> MpiWork:
        return self._start(calls.all_gather_single([output], [tensor], self.size()), opts)

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: _Options | None = None) -> MpiWork:
        return self._start(calls.all_gather_single(outputs, tensors, self.size()), opts)

    def gather(self, outputs: list[Tensors], tensors: Tensors, opts: GatherOptions | None = None) -> MpiWork:
        root = self._member((opts or GatherOptions()).rootRank, "gather")
        into = calls.only(outputs, "gather") if self.rank() == root else []
        if self.rank() == root and len(into) != self.size():
            raise CollectivesError(f"gather got {len(into)} output tensors in a group of {self.size()} ranks.")
        return self._start(calls.gather(into, calls.only(tensors, "gather"), root, self.size()), opts)

    def scatter(self, outputs: Tensors, tensors: list[Tensors], opts: ScatterOptions | None = None) -> MpiWork:
        root = self._member((opts or ScatterOptions()).rootRank, "scatter")
        parts = calls.only(tensors, "scatter") if self.rank() == root else []
        if self.rank() == root and len(parts) != self.size():
            raise CollectivesError(f"scatter got {len(parts)} input tensors in a group of {self.size()} ranks.")
        return self._start(calls.scatter(calls.only(outputs, "scatter"), parts, root, self.size()), opts)

    def reduce_scatter(
        self, outputs: Tensors, tensors: list[Tensors], opts: ReduceScatterOptions | None = None
    ) -> MpiWork:
        opts = opts or ReduceScatterOptions()
        output, parts = calls.only(outputs, "reduce_scatter"), calls.only(tensors, "reduce_scatter")
        return self._start(calls.reduce_scatter(output, parts, opts.reduceOp, self.size()), opts)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions | None = None
    ) -> MpiWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: ReduceScatterOptions | None = None
    ) -> MpiWork:
        opts = opts or ReduceScatterOptions()
        return self._start(calls.reduce_scatter_single(outputs, tensors, opts.reduceOp, self.size()), opts)

    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: _Options | None = None) -> MpiWork:
        return self._start(calls.all_to_all(outputs, tensors, self.size()), opts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], splits: list[int], opts: _Options | None = None
    ) -> MpiWork:
        call = calls.all_to_all_single(output, tensor, output_splits, splits, self.size())
        return self._start(call, opts)

    def barrier(self, opts: _Options | None = None) -> MpiWork:
        return self._start(calls.barrier(), opts)

    # torch before 2.13 calls these methods by other names. Define the other names, too.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def send(self, tensors: Tensors, to: int, tag: int) -> MpiWork:
        return self._messages.send(tensors, self._member(to, "send"), tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> MpiWork:
        return self._messages.receive(tensors, self._member(source, "recv"), tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> MpiWork:
        return self._messages.receive(tensors, None, tag)

    def shutdown(self) -> None:
        """Finish all started operations and free the communicator."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        _GROUPS.discard(self)
        # Close `_messages` before `_lane`, because closing `_lane` frees the communicator that the messages use.
        self._messages.close()
        self._lane.close()

    def abort(self) -> None:
        self._lane.break_off("this process group was aborted; nothing can be done with it any more.")

    @property
    def is_busy(self) -> bool:
        """Return whether any operation is in flight."""
        return self._lane.is_busy or self._messages.is_busy

    def _member(self, rank: int, what: str) -> int:
        # Check the rank before calling MPI, because an error of MPI would make the group unusable.
        if not 0 <= rank < self.size():
            raise CollectivesError(f"{what}: rank {rank} is not in the group, whose ranks are 0 to {self.size() - 1}.")
        return rank

    def _start(self, call: Call, opts: _Options | None) -> MpiWork:
        if self._is_shut_down:
            # If `break_off` has ended the group, raise its error, which is clearer than an error about a destroyed group.
            self._lane.check()
            raise CollectivesError(f"{call.text}: the process group was destroyed.")
        timeout_s = _timeout_s(opts)
        # Block only if the caller passes asyncOp=False. A call without options may be meant to overlap computation.
        if opts is not None and not opts.asyncOp:
            return DoneWork(self._lane.finish(call, timeout_s), call.text)
        return MpiWork(self._lane.start(call, timeout_s), call.text)


_GROUPS: weakref.WeakSet[MpiProcessGroup] = weakref.WeakSet()
_leaves_well = False


def _leave_well() -> None:
    """Let a failed process end with its traceback, without MPI's finalization.

    The finalization would wait for all ranks, and they may wait for this rank. The launcher ends the other ranks.
    """
    global _leaves_well
    if _leaves_well:
        return
    _leaves_well = True
    atexit.register(_abandon_if_busy)
    before = sys.excepthook

    # Abandon MPI when an exception ends the script: MPI's finalization at exit would wait for the other ranks.
    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        mpi.abandon()
        before(kind, error, traceback)

    sys.excepthook = report


def _abandon_if_busy() -> None:
    # Skip MPI's finalization if a call still waits for other ranks, because finalization would wait for these ranks, too.
    if any(group.is_busy for group in list(_GROUPS)):
        mpi.abandon()


def _forsake() -> None:
    """Make all operations on process groups fail in a forked child process."""
    for group in list(_GROUPS):
        # Set this flag first. Later calls then raise the error of `break_off`. Otherwise they would wait for a lock that a
        # thread of the parent process held at the fork.
        group._is_shut_down = True
        group._lane.break_off(
            f"process {os.getpid()} was forked from a rank, which alone can use its process groups. Let a DataLoader's "
            "workers, and what multiprocessing starts, leave collectives to the process that started it."
        )


os.register_at_fork(after_in_child=_forsake)


def _together(each: list[Call], outputs: object) -> Call:
    def run(comm: MPI.Comm) -> None:
        for call in each:
            assert call.run is not None
            call.run(comm)

    return Call(text="; ".join(call.text for call in each), run=run, outputs=outputs)


def _timeout_s(opts: _Options | None) -> float | None:
    # If the caller gave no time limit, torch's options contain -1 ms.
    seconds = -1.0 if opts is None else opts.timeout.total_seconds()
    return seconds if seconds > 0 else None


def _reducing(
    opts: AllreduceOptions | ReduceOp | None, op: ReduceOp | None, timeout: timedelta | None
) -> AllreduceOptions:
    if isinstance(opts, AllreduceOptions):
        return opts
    made = AllreduceOptions()
    chosen = op if opts is None else opts
    if chosen is not None:
        made.reduceOp = chosen
    if timeout is not None:
        made.timeout = timeout
    return made


def _several(tensors: Tensor | Tensors) -> Tensors:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
