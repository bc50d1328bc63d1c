"""Under srun: an MPI that does not find Slurm's PMIx makes each worker a world of its own, and says nothing. This does."""

from __future__ import annotations

from typing import Any

from paceline.errors import RunContextError
from paceline.system.when_loaded import when_loaded


def check_when_loaded(world_size: int) -> None:
    """Let the import of mpi4py's MPI fail where its world is not that of all workers."""
    when_loaded("mpi4py.MPI", lambda mpi: check(mpi, world_size))


def check(mpi: Any, world_size: int) -> None:
    """Refuse a world of another size than the run's; `mpi` is the module. One that is not initialised yet passes.

    Raises:
        RunContextError: both sizes, and the library.
    """
    # mpi4py initialises MPI when it is imported, unless the script has told it not to (mpi4py.rc.initialize).
    if not mpi.Is_initialized() or (size := mpi.COMM_WORLD.Get_size()) == world_size:
        return
    library = mpi.Get_library_version().splitlines()[0].partition(", package")[0].strip(" \0")
    raise RunContextError(
        f"srun started {world_size} workers, but MPI's world has {size}: {library} does not find Slurm's PMIx. Let the "
        "compute target start MPI with mpirun (mpi='mpirun'), or use an Open MPI that was built for this PMIx."
    )
