"""Set a worker's rank variables from the variables of mpirun, or of srun and its PMIx plugin.

Then remove Slurm's variables, because workers have equal environments on every compute target, and some frameworks
would read their ranks from SLURM_ variables. Open MPI 5 needs only PMIx's variables. An older Open MPI needs some of
Slurm's variables, which the option `--keep` names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from paceline.errors import RunContextError
from paceline.system.lazy_import import when_loaded

_RANK_FROM = {
    "PACELINE_RANK": "OMPI_COMM_WORLD_RANK",
    "RANK": "OMPI_COMM_WORLD_RANK",
    "JAX_PROCESS_ID": "OMPI_COMM_WORLD_RANK",
    "HOROVOD_RANK": "OMPI_COMM_WORLD_RANK",
}
#: Variable -> Open MPI's variable to copy if it is not set. Open MPI's value is wrong if several simulated nodes share a machine.
_PLACE_FROM = {"LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK"}
_HINT = (
    "Open MPI's mpirun sets it to a number for each worker. Is this process started by another MPI's mpirun, or by a script "
    "that clears its environment?"
)
_SETTINGS = {"mpirun": "Open MPI's (OMPI_MCA_*, PRTE_MCA_*)", "srun": "Slurm's (SLURM_*, SRUN_*)"}

_SLURM = ("SLURM_", "SLURMD_", "SRUN_")
#: Variable of Open MPI's mpirun that scripts and libraries read -> Slurm's variable with the same value.
_AS_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_LOCAL_RANK": "SLURM_LOCALID",
    "OMPI_COMM_WORLD_NODE_RANK": "SLURM_LOCALID",
}
_SRUN_HINT = (
    "srun sets it to a number for each worker. Is this process started by another program, or by one that clears its "
    "environment?"
)


def from_open_mpi(environment: MutableMapping[str, str], starter: str = "mpirun") -> None:
    """Set RANK and related variables from Open MPI's variables, and check the world size.

    starter: The program that started the workers, for error messages.

    Raises:
        RunContextError: A variable is missing, or the number of workers differs from the job's.
    """
    rank = needed(environment, "OMPI_COMM_WORLD_RANK", _HINT)
    size = needed(environment, "OMPI_COMM_WORLD_SIZE", _HINT)
    # Check the world size before setting the rank, so that a process of another MPI world does not report as a rank of this run.
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
    """Return a variable's value, a text of digits.

    hint: End of the error message: which program sets the variable, and why it may be missing.

    Raises:
        RunContextError: The value is missing or not a number.
    """
    value = environment.get(name)
    if value is None or not value.isdecimal():
        raise RunContextError(f"{name}={value!r}: {hint}")
    return value


def take_place(environment: MutableMapping[str, str], options: Sequence[str]) -> list[str]:
    """Under srun, set the variables that mpirun would set, and remove Slurm's variables.

    Return this worker's `--set` options. `options` are for all workers. `--set NAME=VALUE` is for the ranks in the
    preceding `--for FIRST-LAST --on NODE`. `--keep NAME` keeps a variable of Slurm.

    Raises:
        RunContextError: A variable of srun is missing, or the worker is on another node than planned.
    """
    if environment.get("PMIX_RANK") != environment.get("SLURM_PROCID"):
        raise RunContextError(
            f"PMIX_RANK={environment.get('PMIX_RANK')!r}, SLURM_PROCID={environment.get('SLURM_PROCID')!r}: srun with a PMIx "
            "plugin sets both to the worker's rank. Without it each worker would be a world of its own. Let the compute target "
            "start MPI with mpirun (mpi='mpirun')."
        )
    said = {name: needed(environment, source, _SRUN_HINT) for name, source in _AS_MPIRUN.items()}
    # SLURM_GTIDS lists the ranks of all workers on this node.
    said["OMPI_COMM_WORLD_LOCAL_SIZE"] = str(len(environment.get("SLURM_GTIDS", "").split(",")))
    # Read SLURMD_NODENAME now, because the loop below removes it from the environment.
    node = environment.get("SLURMD_NODENAME")
    kept = [value for option, value in zip(options[::2], options[1::2], strict=True) if option == "--keep"]
    for name in [name for name in environment if name.startswith(_SLURM) and name not in kept]:
        del environment[name]
    environment.update(said)
    return _own(options, int(said["OMPI_COMM_WORLD_RANK"]), node)


def _own(options: Sequence[str], rank: int, node: str | None) -> list[str]:
    kept: list[str] = []
    is_own = True
    for option, value in zip(options[::2], options[1::2], strict=True):
        if option == "--for":
            first, _, last = value.partition("-")
            is_own = int(first) <= rank <= int(last)
        elif option == "--on":
            if is_own and value != node:
                raise RunContextError(
                    f"srun started rank {rank} on node {node}, but its place is on {value}. Does a setting of the job's "
                    "(SLURM_*, SRUN_* variables) change where srun puts workers? Unset it."
                )
        elif is_own and option == "--set":
            kept += [option, value]
    return kept


def check_when_loaded(world_size: int) -> None:
    """Make `from mpi4py import MPI` fail unless MPI's world has all workers.

    An MPI that does not find Slurm's PMIx silently gives each worker a separate world of size 1.
    """
    when_loaded("mpi4py.MPI", lambda mpi: check(mpi, world_size))


def check(mpi: Any, world_size: int) -> None:
    """Raise unless MPI's world has as many processes as the run has workers.

    mpi: The module mpi4py.MPI.

    Raises:
        RunContextError: The sizes differ; the message has both sizes and the MPI library.
    """
    # mpi4py initialises MPI on import, unless the script has disabled that (mpi4py.rc.initialize).
    if not mpi.Is_initialized() or (size := mpi.COMM_WORLD.Get_size()) == world_size:
        return
    library = mpi.Get_library_version().splitlines()[0].partition(", package")[0].strip(" \0")
    raise RunContextError(
        f"srun started {world_size} workers, but MPI's world has {size}: {library} does not find Slurm's PMIx. Let the "
        "compute target start MPI with mpirun (mpi='mpirun'), or use an Open MPI that was built for this PMIx."
    )
