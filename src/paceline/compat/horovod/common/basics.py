"""Horovod's functions that start and stop it, or return ranks, sizes and capabilities."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from paceline.compat.horovod.common import handles, ops, timeline
from paceline.compat.horovod.common.process_sets import ProcessSet, registry
from paceline.compat.horovod.common.types import RanksOrComm

if TYPE_CHECKING:
    from paceline.collectives.engine import Engine

_log = logging.getLogger(__name__)
#: Environment variable that a rank sets to its process id and its launcher's variables. Child processes inherit it.
_JOINED = "HOROVOD_JOINED_BY"


def init(comm: RanksOrComm | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect this process with the ranks that were started with it.

    Args:
        comm: All ranks, as a list or an mpi4py communicator. None also means all ranks; a part of the ranks is refused.
        process_sets: Sets to create now, the same on every rank. "dynamic" lets `add_process_set` create sets later.

    Raises:
        ValueError: `comm` leaves ranks out, or a process set has ranks outside the world.
        CollectivesError: The ranks cannot reach each other, or this process is a child of a rank.
    """
    from paceline import collectives

    if is_initialized():
        return
    _refuse_ranks_child()
    engine = collectives.start()
    try:
        if engine.size > 1:
            os.environ[_JOINED] = f"{os.getpid()} {_place()}"
        _check_comm(comm, engine.size)
        named = isinstance(process_sets, str)
        dynamic = named or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
        if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets={process_sets!r}: give a list of hvd.ProcessSet, or 'dynamic'.")
        registry.begin(engine, dynamic=dynamic, first=[] if isinstance(process_sets, str) else process_sets or [])
    # The engine may already run, and other ranks may wait for this rank. `shutdown` tells them of the failure.
    except BaseException:
        shutdown()
        raise
    timeline.begin(engine)
    if engine.rank == 0 and os.environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
        _log.warning(
            "HOROVOD_AUTOTUNE=%s: nothing is tuned. HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME set what autotuning "
            "would choose; their defaults fit the machine.",
            os.environ["HOROVOD_AUTOTUNE"],
        )


def shutdown() -> None:
    """Leave the world. Operations in flight raise HorovodInternalError on the ranks that wait."""
    from paceline import collectives

    try:
        # If `stop` raises an exception, still remove the state, so that a later `init` starts without it.
        collectives.stop()
    finally:
        # Remove the variable only in the process that has set it: a forked child inherits it from a parent that is still a rank.
        if os.environ.get(_JOINED, "").partition(" ")[0] == str(os.getpid()):
            del os.environ[_JOINED]
        timeline.end()
        handles.clear()
        registry.end()


def is_initialized() -> bool:
    """Return whether `init` has been called.

    In a forked child, such as a DataLoader worker, return the same as in the parent. The child has the parent's rank.
    """
    return registry.is_begun


def engine() -> Engine:
    """Return the running collective engine.

    Raises:
        ValueError: `init` has not been called, or `shutdown` has.
    """
    return registry.engine()


def size() -> int:
    return int(engine().size)


def local_size() -> int:
    """Return the number of ranks on this rank's machine."""
    return int(engine().local_size)


def cross_size() -> int:
    """Return how many machines have a rank with this rank's local rank."""
    return int(engine().cross_size)


def rank() -> int:
    return int(engine().rank)


def local_rank() -> int:
    return int(engine().local_rank)


def cross_rank() -> int:
    return int(engine().cross_rank)


def is_homogeneous() -> bool:
    """Return whether every machine has the same number of ranks."""
    return bool(engine().is_homogeneous)


def mpi_threads_supported() -> bool:
    """Return whether MPI was initialized for calls from several threads.

    Raises:
        ValueError: `init` has not been called, or the ranks do not use MPI.
    """
    if engine().transport_name != "mpi":
        raise ValueError("mpi_threads_supported() has no answer: this job's ranks don't use MPI.")
    from mpi4py import MPI

    return bool(MPI.Is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Return whether the ranks use, or will use, MPI."""
    return _transport_name() == "mpi"


def mpi_built() -> bool:
    """Return whether mpi4py is installed."""
    return find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Return whether the ranks use, or will use, Gloo."""
    return _transport_name() == "gloo"


def gloo_built() -> bool:
    """Return whether torch is installed. Every build for Linux has Gloo."""
    return find_spec("torch") is not None


def nccl_built() -> int:
    """Return the NCCL version of the loaded torch, such as 22703, else 0."""
    # Don't import torch here, because that would take seconds in a script that does not use torch.
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None:
        return 0
    with suppress(Exception):
        major, minor, patch = torch.cuda.nccl.version()[:3]
        return int(major * 10000 + minor * 100 + patch)
    return 0


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    """Return whether the loaded torch was built for CUDA."""
    return getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) is not None


def rocm_built() -> bool:
    """Return whether the loaded torch was built for ROCm."""
    return getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None) is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start a Chrome trace on rank 0. Close a trace in progress.

    Raises:
        ValueError: HOROVOD_TIMELINE is not DYNAMIC, or `init` has not been called.
    """
    if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
        raise ValueError(
            "the timeline can't be started: set HOROVOD_TIMELINE=DYNAMIC before hvd.init() to start it from the script, "
            "or HOROVOD_TIMELINE=<file> to write one of the whole job."
        )
    timeline.start(file_path, engine(), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Close the trace, if one is open, after the operations in flight.

    Raises:
        ValueError: `init` has not been called.
    """
    engine()
    timeline.stop()


def _place() -> str:
    """Return the launcher's variables that identify this process, joined by colons."""
    # A rank may start a new job by mpirun or torchrun. These variables differ in that job, so it may call `init`.
    names = ("PMIX_NAMESPACE", "PMIX_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK")
    return ":".join(os.environ.get(name, "") for name in names)


def _refuse_ranks_child() -> None:
    from paceline.collectives.errors import CollectivesError

    pid, _, place = os.environ.get(_JOINED, "").partition(" ")
    # Without the variable HOROVOD_JOINED_BY, `place` is "". It then differs from `_place()`, which contains colons.
    if place == _place() and int(pid) != os.getpid():
        raise CollectivesError(
            f"hvd.init() was called in process {os.getpid()}, a child of the rank in process {pid}, which has called it "
            "already. If it comes from a DataLoader's workers or multiprocessing, they have run the script again: put "
            "what the script does under `if __name__ == '__main__':`."
        )


def _transport_name() -> str:
    from paceline import collectives
    from paceline.collectives import world

    running = collectives.current()
    return running.transport_name if running is not None else world.choice(os.environ)


def _check_comm(comm: RanksOrComm | None, world_size: int) -> None:
    if comm is None:
        return
    # For a communicator, check only its size: if it has as many ranks as the world, it contains all ranks.
    ranks = sorted(comm) if isinstance(comm, Iterable) else list(range(comm.size))
    if ranks and ranks != list(range(world_size)):
        raise ValueError(
            f"comm has the ranks {ranks}, but {world_size} were started. hvd.init() takes all of them; give the ones "
            "that work together as a process set: hvd.init(process_sets=[hvd.ProcessSet(ranks)])."
        )


class HorovodBasics:
    """A class with this module's functions as static methods.

    The constructor ignores its arguments, which describe Horovod's compiled library.
    """

    Average, Sum, Adasum = ops.Average, ops.Sum, ops.Adasum
    Min, Max, Product = ops.Min, ops.Max, ops.Product
    vars().update({name: staticmethod(f) for name, f in globals().items() if getattr(f, "__module__", "") == __name__})

    def __init__(self, *args: object) -> None:
        pass
