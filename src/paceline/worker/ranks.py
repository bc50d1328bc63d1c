"""A worker's ranks from the variables that mpirun gives it. Nothing is computed that mpirun says."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from paceline.errors import RunContextError

_RANK_FROM = {
    "PACELINE_RANK": "OMPI_COMM_WORLD_RANK",
    "RANK": "OMPI_COMM_WORLD_RANK",
    "JAX_PROCESS_ID": "OMPI_COMM_WORLD_RANK",
    "HOROVOD_RANK": "OMPI_COMM_WORLD_RANK",
}
#: Only where the command line has not said it: where stand-in nodes share a machine, Open MPI knows of one host alone.
_PLACE_FROM = {
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "HOROVOD_LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
}
_HINT = (
    "Open MPI's mpirun sets it to a number for each worker. Is this process started by another MPI's mpirun, or by a script "
    "that clears its environment?"
)
_SETTINGS = {"mpirun": "Open MPI's (OMPI_MCA_*, PRTE_MCA_*)", "srun": "Slurm's (SLURM_*, SRUN_*)"}


def from_open_mpi(environment: MutableMapping[str, str], starter: str = "mpirun") -> None:
    """Set RANK and its family from Open MPI's variables, and check them against the job's world size.

    starter: the program that started the workers, for messages.

    Raises:
        RunContextError: a variable of Open MPI's is missing, or mpirun started another number of workers.
    """
    rank = needed(environment, "OMPI_COMM_WORLD_RANK", _HINT)
    size = needed(environment, "OMPI_COMM_WORLD_SIZE", _HINT)
    # Before anything is set: a worker of a world of another size must not report as one of the run's.
    if size != environment.get("WORLD_SIZE"):
        raise RunContextError(
            f"{starter} started {size} workers, but the job has {environment.get('WORLD_SIZE')}. "
            f"A setting of {_SETTINGS.get(starter, starter)} changes how many it starts; unset it."
        )
    for name, source in _RANK_FROM.items():
        environment[name] = needed(environment, source, _HINT)
    for name, source in _PLACE_FROM.items():
        environment.setdefault(name, needed(environment, source, _HINT))
    folder = os.path.join(environment["PACELINE_RUN_DIR"], "attempts", environment["PACELINE_ATTEMPT"])
    environment["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, f"error_{rank}.json")


def needed(environment: Mapping[str, str], name: str, hint: str) -> str:
    """A variable whose value is a number.

    Raises:
        RunContextError: it has no such value; what it has, and the hint: who sets it, and why that may not have been.
    """
    value = environment.get(name)
    if value is None or not value.isdigit():
        raise RunContextError(f"{name}={value!r}: {hint}")
    return value
