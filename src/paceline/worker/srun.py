"""A worker's place from the variables that srun and its PMIx plugin give it. Nothing is computed that srun says.

What Slurm says of the step is then taken out of the environment: on every target a worker finds the same, and a framework
that meets SLURM_ variables takes its place from them. Open MPI 5 needs PMIx's alone, an older one is told what to keep.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from paceline.errors import RunContextError
from paceline.worker.ranks import needed

_SLURM = ("SLURM_", "SLURMD_", "SRUN_")
#: What Open MPI's mpirun would have set: scripts and libraries look for it.
_AS_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_LOCAL_RANK": "SLURM_LOCALID",
    "OMPI_COMM_WORLD_NODE_RANK": "SLURM_LOCALID",
}
_HINT = (
    "srun sets it to a number for each worker. Is this process started by another program, or by one that clears its "
    "environment?"
)


def take_place(environment: MutableMapping[str, str], options: Sequence[str]) -> list[str]:
    """Set what mpirun would have set, and drop what is Slurm's; the `--set` options that are for this worker.

    options: `--set NAME=VALUE` behind `--for FIRST-LAST --on NODE` counts for those ranks alone, which are on that node.
        `--keep NAME`: a variable of Slurm's that is not dropped.

    Raises:
        RunContextError: a variable of srun's is missing, or it has put this worker on another node than planned.
    """
    if environment.get("PMIX_RANK") != environment.get("SLURM_PROCID"):
        raise RunContextError(
            f"PMIX_RANK={environment.get('PMIX_RANK')!r}, SLURM_PROCID={environment.get('SLURM_PROCID')!r}: srun with a PMIx "
            "plugin sets both to the worker's rank. Without it each worker would be a world of its own. Let the compute target "
            "start MPI with mpirun (mpi='mpirun')."
        )
    said = {name: needed(environment, source, _HINT) for name, source in _AS_MPIRUN.items()}
    # The ranks of all workers on this node.
    said["OMPI_COMM_WORLD_LOCAL_SIZE"] = str(len(environment.get("SLURM_GTIDS", "").split(",")))
    # Read before it is dropped with the others.
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
