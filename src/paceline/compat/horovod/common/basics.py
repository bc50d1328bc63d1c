"""Lifecycle, topology, and what this build can do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.compat.horovod.common import handles, timeline
from paceline.compat.horovod.common.process_sets import ProcessSet, registry

if TYPE_CHECKING:
    from paceline.collectives.engine import Engine


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the world of the ranks that were started together. Again: nothing happens.

    comm: all ranks, as a list or an mpi4py communicator; None is the same.
    process_sets: sets to make at once, the same on every rank; "dynamic" lets `add_process_set` make them later.

    Raises:
        ValueError: `comm` leaves ranks out; ranks that form no part of the world in a process set.
        CollectivesError: the ranks can't reach each other, with the reason.
    """
    from paceline import collectives

    if collectives.current() is not None:
        return
    engine = collectives.start()
    try:
        _check_comm(comm, engine.size)
        dynamic = process_sets == "dynamic" or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
        if isinstance(process_sets, str) and process_sets != "dynamic":
            raise ValueError(f"process_sets={process_sets!r}: give a list of hvd.ProcessSet, or 'dynamic'.")
        registry.begin(engine, dynamic=dynamic, first=[] if isinstance(process_sets, str) else process_sets or [])
    except BaseException:
        shutdown()
        raise
    timeline.begin(engine.rank)


def shutdown() -> None:
    """Leave the world. What is still under way raises HorovodInternalError on the ranks that wait for it."""
    from paceline import collectives

    try:
        collectives.stop()
    finally:
        timeline.end()
        handles.clear()
        registry.end()


def is_initialized() -> bool:
    from paceline import collectives

    return collectives.current() is not None


def engine() -> Engine:
    """The running engine.

    Raises:
        ValueError: `init` has not been called, or `shutdown` has.
    """
    from paceline import collectives

    running = collectives.current()
    if running is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return running


def size() -> int:
    return int(engine().size)


def local_size() -> int:
    """The number of ranks on this rank's machine."""
    return int(engine().local_size)


def cross_size() -> int:
    """The number of machines that have a rank with this local rank."""
    return int(engine().cross_size)


def rank() -> int:
    return int(engine().rank)


def local_rank() -> int:
    return int(engine().local_rank)


def cross_rank() -> int:
    return int(engine().cross_rank)


def is_homogeneous() -> bool:
    """Whether every machine has equally many ranks."""
    running = engine()
    return bool(running.local_size * running.cross_size == running.size)


def mpi_threads_supported() -> bool:
    """Whether MPI was initialised for calls from several threads; ValueError before `init`, as the rest."""
    engine()
    with suppress(ImportError):
        from mpi4py import MPI

        return bool(MPI.Is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE)
    return False


def mpi_enabled() -> bool:
    return mpi_built()


def mpi_built() -> bool:
    return find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    return False


def gloo_built() -> bool:
    return False


def nccl_built() -> int:
    return 0


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    return False


def rocm_built() -> bool:
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write a trace in Chrome's format on rank 0.

    Raises:
        ValueError: HOROVOD_TIMELINE isn't DYNAMIC, or a trace is being written.
    """
    if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
        raise ValueError(
            "the timeline can't be started: set HOROVOD_TIMELINE=DYNAMIC before hvd.init() to start it from the script, "
            "or HOROVOD_TIMELINE=<file> to write one of the whole job."
        )
    timeline.start(file_path, rank(), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Close the trace's file, after what is under way now.

    Raises:
        ValueError: HOROVOD_TIMELINE isn't DYNAMIC.
    """
    if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
        raise ValueError("the timeline can be stopped by the script only with HOROVOD_TIMELINE=DYNAMIC.")
    timeline.stop()


def _check_comm(comm: Any, world_size: int) -> None:
    if comm is None:
        return
    ranks = sorted(comm) if isinstance(comm, Sequence) else list(range(comm.size))
    # An empty list is Horovod's own default.
    if ranks and ranks != list(range(world_size)):
        raise ValueError(
            f"comm has the ranks {ranks}, but {world_size} were started. hvd.init() takes all of them; give the ones "
            "that work together as a process set: hvd.init(process_sets=[hvd.ProcessSet(ranks)])."
        )
